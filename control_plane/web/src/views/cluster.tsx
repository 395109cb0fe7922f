/** The cluster: what needs a person, what it earns, what slots did, the newest incidents, who leads. */
import { useEffect, useMemo } from "preact/hooks"
import { ActButton, NeedActs } from "../acts"
import type { Schemas } from "../api"
import { Chart } from "../chart"
import { count, percent, si, span } from "../format"
import { Gantt, type Window } from "../gantt"
import { useGet } from "../live"
import { change, link } from "../route"
import { Ago, Said, Section, Severity, State, Table, Time, Trouble } from "../ui"
import type { ViewProps } from "./index"

const OVER = new Set(["finished", "failed", "cancelled"])

export function Cluster({ state, at, query, now_s, recorded, mayAct }: ViewProps) {
  const names = new Map(state.tasks.map(one => [one.id, one.name]))
  return <>
    <Needs state={state} at={at} now_s={now_s} mayAct={mayAct} />
    <div class="columns">
      <Waf state={state} />
      <Leader state={state} at={at} now_s={now_s} past={recorded || Boolean(at)} mayAct={mayAct} />
    </div>
    <Slots at={at} at_s={at ? state.cluster.at_s : undefined} query={query} />
    <Incidents state={state} names={names} at={at} now_s={now_s} />
    <Tasks state={state} at={at} />
  </>
}

function Needs({ state, at, now_s, mayAct }: { state: Schemas["View"]; at: string; now_s: number; mayAct: boolean }) {
  const told = new Set(state.needs.map(one => one.node))
  const fresh = state.nodes.filter(one => (one.contact === "lost" || one.contact === "unreachable") && !told.has(one.id))
  return <Section title="Needs a person">
    {state.needs.length === 0 && fresh.length === 0 && <p class="calm"><span aria-hidden="true">✓</span> Nothing needs a person.</p>}
    {fresh.map(one => <p class="needs-line"><a href={link("nodes", one.id, { at })}>{one.id}</a> is {one.contact} since{" "}
      {span(Math.max(now_s - one.since_s, 0))}: its agent may come back by itself; after 15 s it needs a person.</p>)}
    <ul class="needs">{state.needs.slice(0, 50).map(one => <li>
      <strong>{one.why}</strong>
      {one.since_s > 0 && <> <Ago at_s={one.since_s} now_s={now_s} /></>}
      <br /><Said text={one.do} />
      {one.incident > 0 && <> <a href={link("incident", one.incident, { at })}>inc-{one.incident}</a></>}
      {one.task > 0 && <> <a href={link("task", one.task, { at })}>task {one.task}</a></>}
      {mayAct && <NeedActs need={one} />}
    </li>)}</ul>
    {state.needs.length > 50 && <p class="empty">and {state.needs.length - 50} more</p>}
  </Section>
}

function Waf({ state }: { state: Schemas["View"] }) {
  const { plan, tasks, cluster } = state
  const now = tasks.reduce((sum, one) => sum + one.waf, 0)
  const live = new Set(tasks.filter(one => !OVER.has(one.state)).map(one => one.id))
  const planned = [...plan?.allocations ?? [], ...plan?.kept ?? []]
    .reduce((sum, one) => sum + (live.has(one.task) ? one.waf : 0), 0)
  const rows: [string, number][] = [["now", now], ["plan", planned], ["ideal", plan?.ideal_waf ?? 0]]
  const most = Math.max(...rows.map(([, value]) => value), 1)
  const earned = useMemo(() => ({
    x: cluster.earned.map(one => one.at_s), values: [cluster.earned.map(one => one.flop / one.length_s)],
  }), [cluster.seq])
  const origins = [...new Set(tasks.filter(one => live.has(one.id) && one.throughput).map(one => one.throughput!["origin"]))]
  return <Section title="WAF" note={`weighted achieved FLOP/s${origins.length ? `; plan and ideal by ${origins.join(" and ")} throughput` : ""}`}>
    <table class="bars"><tbody>{rows.map(([name, value]) => <tr>
      <th scope="row">{name}</th>
      <td><meter min={0} max={most} value={value} aria-label={`WAF ${name}`} /></td>
      <td class="right">{si(value, "FLOP/s")}</td>
      <td class="right">{name === "ideal" || !plan?.ideal_waf ? "" : percent(value / plan.ideal_waf)}</td>
    </tr>)}</tbody></table>
    {earned.x.length > 2 && <Chart label="WAF over time" isTime height={120} x={earned.x} values={earned.values}
      lines={[{ label: "earned", colour: "use-used", format: value => si(value) }]} />}
  </Section>
}

function Leader({ state, at, now_s, past, mayAct }: { state: Schemas["View"]; at: string; now_s: number; past: boolean; mayAct: boolean }) {
  const { cluster, nodes, tasks } = state
  const used = tasks.reduce((sum, one) => sum + one.slots.now, 0)
  const ill = nodes.filter(one => one.health !== "healthy" && one.health !== "left").length
  const barred = nodes.filter(one => one.drained || one.quarantine)
  const mtbf_s = cluster.mtbf_gpu_s / Math.max(cluster.num_slots, 1)
  return <Section title="Control plane">
    <dl>
      <dt>leads</dt><dd>{past ? "" : `${cluster.follows || "this one"}, `}epoch {cluster.epoch}</dd>
      {!past && <><dt>followers</dt><dd>{cluster.followers.join(", ") || "none"}</dd></>}
      <dt>healing</dt><dd>{cluster.healing === "on" ? "on" : <State of="open" />}{cluster.healing !== "on" && ` ${cluster.healing}`}</dd>
      <dt>slots</dt><dd>{count(used)} of {count(cluster.num_slots)} have a rank</dd>
      <dt>nodes</dt><dd>{count(nodes.length)}, {ill ? <strong>{ill} not healthy</strong> : "all healthy"}{barred.length > 0 && <>, {count(barred.length)} drained or in quarantine:
        {barred.slice(0, 3).map(one => <> <a href={link("nodes", one.id, { at })}>{one.id}</a></>)}{barred.length > 3 && " …"}</>}</dd>
      <dt>MTBF</dt><dd>{span(mtbf_s)} of the cluster, as plans expect; {cluster.num_faults ? `${cluster.num_faults} ${cluster.num_faults === 1 ? "fault" : "faults"} so far` : "no fault so far"}</dd>
      <dt>log</dt><dd>record {count(cluster.seq)}, <Ago at_s={cluster.at_s} now_s={now_s} /></dd>
    </dl>
    {mayAct && <p class="acts"><ActButton kind={cluster.healing.startsWith("frozen") ? "unfreeze" : "freeze"} /></p>}
  </Section>
}

function Slots({ at, at_s, query }: { at: string; at_s: number | undefined; query: Record<string, string> }) {
  const asked: Partial<Window> = query.from && query.to ? { from_s: Number(query.from), to_s: Number(query.to) } : {}
  const { data, problem, again } = useGet("/v1/timeline", { from: asked.from_s, to: asked.to_s, buckets: 500 })
  const isPart = data !== undefined && data.read_seq < data.last_seq
  useEffect(() => {
    if (!isPart) return
    const timer = setTimeout(again, 300)
    return () => { clearTimeout(timer) }
  }, [data])
  const shown = data && { from_s: asked.from_s ?? data.from_s, to_s: asked.to_s ?? data.to_s }
  return <Section title="Slots by task over time">
    <Trouble problem={problem} />
    {isPart && <p role="status">
      reading the log: {percent(data.read_seq / data.last_seq)}</p>}
    {data && shown && <Gantt data={data} window={shown} at_s={at ? at_s : undefined}
      onWindow={({ from_s, to_s }) => {
        const all = from_s <= data.first_s && to_s >= data.read_s
        change({ from: all ? undefined : from_s.toFixed(3), to: all ? undefined : to_s.toFixed(3) })
      }}
      onPick={picked_s => { change({ at: new Date(picked_s * 1000).toISOString() }) }} />}
    {!data && !problem && <p class="empty">reading the log…</p>}
  </Section>
}

function Incidents({ state, names, at, now_s }: {
  state: Schemas["View"]; names: Map<number, string>; at: string; now_s: number
}) {
  const newest = [...state.incidents].sort((a, b) => b.id - a.id)
  return <Section title="Newest incidents">
    <Table label="Newest incidents" rows={newest} max={10} empty="No incident." columns={[
      { name: "Incident", cell: one => <a href={link("incident", one.id, { at })}>inc-{one.id}</a> },
      { name: "When", cell: one => <><Time at_s={one.opened_s} /> <small><Ago at_s={one.opened_s} now_s={now_s} /></small></> },
      { name: "Severity", cell: one => <Severity of={one.severity} /> },
      { name: "State", cell: one => <State of={one.outcome || (one.recovering_s ? "recovering" : "open")} /> },
      { name: "Task", cell: one => names.get(one.task) ?? (one.task || "–") },
      { name: "What", cell: one => one.why },
      { name: "Pause", right: true, cell: one => one.outcome || one.recovering_s ? span(one.pause_s) : "" },
      { name: "Lost", right: true, cell: one => one.iterations_lost ?? "?" },
    ]} />
  </Section>
}

function Tasks({ state, at }: { state: Schemas["View"]; at: string }) {
  const rows = [...state.tasks].sort((a, b) => Number(OVER.has(a.state)) - Number(OVER.has(b.state)) || a.id - b.id)
  const more = state.cluster.num_tasks - rows.length
  return <Section title="Tasks" note={<>{count(state.cluster.num_tasks)}; <a href={link("task", "", { at })}>find one</a></>}>
    <Table label="Tasks" rows={rows} max={50} empty="No task." columns={[
      { name: "Task", cell: one => <a href={link("task", one.id, { at })}>{one.name}</a> },
      { name: "State", cell: one => <State of={one.state} /> },
      { name: "Slots", right: true, cell: one => one.slots.now },
      { name: "Layout", cell: one => one.layout },
      { name: "Weight", right: true, cell: one => one.weight },
      { name: "Iteration", right: true, cell: one => one.iterations ? `${count(one.iteration)} / ${count(one.iterations)}` : count(one.iteration) },
      { name: "Iteration time", right: true, cell: one => one.step_s ? span(one.step_s) : "" },
      { name: "Loss", right: true, cell: one => one.not_finite ? String(one.not_finite.text) : one.loss?.toFixed(3) ?? "" },
      { name: "WAF", right: true, cell: one => si(one.waf) },
      { name: "Healed", right: true, cell: one => one.healed },
      { name: "Lost", right: true, cell: one => one.iterations_lost ?? "?" },
      { name: "Why", cell: one => one.why },
    ]} />
    {more > 0 && <p class="empty">{count(more)} that ended earlier are not in this list.</p>}
  </Section>
}
