/** A task: its ranks and who holds up whom, its curves, its layouts, who has its state, its faults, its output. */
import { useEffect, useMemo, useState } from "preact/hooks"
import { TaskActs } from "../acts"
import { get, type Problem, type Schemas } from "../api"
import { Chart } from "../chart"
import { count, digits, si, span } from "../format"
import { useGet } from "../live"
import { link } from "../route"
import { Ago, Filter, Section, Severity, State, Table, Time, Trouble } from "../ui"
import type { ViewProps } from "./index"

type Task = Schemas["TaskView"]
const GIB = 2 ** 30

export function TaskPage(props: ViewProps) {
  return props.of ? <One {...props} /> : <Choice {...props} />
}

function One({ state, at, of, now_s, recorded, mayAct }: ViewProps) {
  const here = state.tasks.find(one => String(one.id) === of || one.name === of)
  // One that has ended is asked for: the state has only the newest of those.
  const { data, problem } = useGet("/v1/tasks/{task}", { task: of, at }, Boolean(here) || !/^\d+$/.test(of))
  const task = here ?? (data && String(data.id) === of ? data : undefined)
  const number = task?.id ?? Number(of)
  if (!task && (problem || !Number.isInteger(number))) return <>
    <p>There is no task {of} at this moment: it was not submitted yet, or left the state long ago.
      {" "}<a href={link("task", "", { at, filter: of })}>Find a task</a></p>
    {Number.isInteger(number) && <Faults task={number} at={at} state={state} />}
  </>
  return <>
    {task && <><Summary task={task} now_s={now_s} /><Ranks task={task} at={at} /></>}
    <Curves task={number} at_s={at ? state.cluster.at_s : undefined} />
    {task && <Holders task={task} />}
    <Faults task={number} at={at} state={state} />
    {task && mayAct && <TaskActs of={task} />}
    {task && !at && !recorded && <Output task={task} mayRead={mayAct} />}
  </>
}

const PAGE_NUM = 100

/** All tasks, in pages; a filter is answered by the control plane, which knows also those that ended earlier. */
function Choice({ state, at, query }: ViewProps) {
  const filter = query.filter ?? ""
  const [cursors, setCursors] = useState([""])
  useEffect(() => { setCursors([""]) }, [filter, at])
  const { data, problem, busy } = useGet("/v1/tasks", { find: filter, limit: PAGE_NUM, cursor: cursors.at(-1), at })
  return <Section title="Tasks" note={`${count(state.cluster.num_tasks)}, by number`}>
    <Filter of="number, name, team, state" text={filter} />
    <Trouble problem={problem} />
    <div aria-busy={busy}><Table label="Tasks" rows={data?.items ?? []} empty={data ? "No task." : "reading the tasks…"} columns={[
      { name: "Number", right: true, cell: one => one.id },
      { name: "Task", cell: one => <a href={link("task", one.id, { at })}>{one.name}</a> },
      { name: "State", cell: one => <State of={one.state} /> },
      { name: "Team", cell: one => one.team },
      { name: "Submitted", cell: one => <Time at_s={one.submitted_s} /> },
      { name: "Slots", right: true, cell: one => one.slots.now },
      { name: "Why", cell: one => one.why },
    ]} /></div>
    <p class="tools">
      <button type="button" disabled={cursors.length === 1} onClick={() => { setCursors(cursors.slice(0, -1)) }}>Page before</button>
      <button type="button" disabled={!data?.next} onClick={() => { setCursors([...cursors, data!.next]) }}>Next page</button>
    </p>
  </Section>
}

function Summary({ task, now_s }: { task: Task; now_s: number }) {
  const left = task.iterations - task.iteration
  return <Section title={task.name}>
    <dl>
      <dt>state</dt><dd><State of={task.state} /> since <Ago at_s={task.since_s} now_s={now_s} /></dd>
      {(task.why || task.needs) && <><dt>why</dt><dd>{[task.why, task.needs].filter(Boolean).join("; needs ")}</dd></>}
      {task.failing && <><dt>failing</dt><dd>{task.failing.why}, failure {task.failing.num}{task.failing.until_s
        ? <>; it may pass, tried until <Time at_s={task.failing.until_s} /></> : ` of ${task.failing.num_max} without progress`}</dd></>}
      {task.failed_saves.map(one => <><dt>not saved</dt><dd><strong>{one.what} of iteration {count(one.step_version)}</strong>{" "}
        since <Ago at_s={one.since_s} now_s={now_s} />: {one.path} ({one.node}): {one.why}{one.final && "; its processes keep the final state, and it is tried again"}</dd></>)}
      {task.stands && <><dt>stalled</dt><dd><strong>{task.stands}</strong></dd></>}
      {task.works.map(one => <><dt>works</dt><dd>{one.ranks.length === 1 ? `rank ${one.ranks[0]}` : `${one.ranks.length} ranks`}: {
        one.what || `read and wrote ${si(one.moved_bytes, "B")}`}{one.total > 0 && <>{" "}
        <progress max={one.total} value={one.done} aria-label={one.what} /></>}
        {one.unit === "B" && `, ${si(one.done, "B")}${one.total ? ` of ${si(one.total, "B")}` : ""}`}
        {one.unit && one.unit !== "B" && `, ${count(one.done)}${one.total ? ` of ${count(one.total)}` : ""} ${one.unit}`}
        {one.ends_s !== null && one.ends_s > now_s && `, ${span(one.ends_s - now_s)} left`}
        {now_s - one.moved_s >= one.limit_s / 2 && <strong>; nothing moved for {span(now_s - one.moved_s)} ({one.limit}: {span(one.limit_s)})</strong>}
      </dd></>)}
      <dt>slots</dt><dd>{task.slots.now} of {task.slots.target} planned; {task.slots.min} to {task.slots.max}, weight {task.weight}</dd>
      <dt>layout</dt><dd>{task.layout_in_words || task.layout || "–"}</dd>
      <dt>sums</dt><dd>{task.reproducible === "rounding" ? "with rounding: a recovered run equals the undisturbed one to about 1e-7"
        : task.rounding_why ? <strong>with rounding, not bit for bit: {task.rounding_why}</strong>
          : task.generation ? "exact: a recovered run has the bits of the undisturbed one" : "not known before its ranks are ready"}</dd>
      <dt>progress</dt><dd>{count(task.iteration)}{task.iterations > 0 && <> of {count(task.iterations)}{" "}
        <progress max={task.iterations} value={task.iteration} aria-label="iterations" /></>}</dd>
      <dt>pace</dt><dd>{task.step_s ? `${span(task.step_s)} an iteration` : "–"}
        {task.slowdown > 1.01 && <strong>, {digits(task.slowdown)} x slower than its ranks can</strong>}
        {task.step_s > 0 && left > 0 && `; ${span(left * task.step_s)} are left`}</dd>
      <dt>loss</dt><dd>{task.not_finite
        ? <strong>{String(task.not_finite.text)} since iteration {count(Number(task.not_finite.first))}</strong>
        : task.loss?.toFixed(4) ?? "–"}</dd>
      <dt>WAF</dt><dd>{si(task.waf, "FLOP/s")}</dd>
      <dt>healed</dt><dd>{task.healed === 1 ? "once" : `${task.healed} times`}, {task.iterations_lost ?? "unknown"} iterations lost</dd>
    </dl>
  </Section>
}

/** A cell for each rank; the slow ones say how many they hold up. */
function Ranks({ task, at }: { task: Task; at: string }) {
  const slow = new Map(task.slow.map(one => [one.rank, one]))
  const held = task.ranks.filter(one => one.state === "member").length - slow.size
  const known = task.ranks.slice(0, 2048)
  return <Section title="Ranks" note={`${task.ranks.length}, by number`}>
    {task.slow.map(one => <p class="needs-line"><strong>rank {one.rank}</strong> ({one.node}, slot {one.slot}) holds
      up {held} others: {digits(one.holds_up)} x{one.confirmed ? "" : ", not confirmed by another process"}</p>)}
    {known.length === 0 && <p class="empty">No rank.</p>}
    <ul class="ranks" aria-label="Ranks">{known.map(rank => {
      const late = slow.get(rank.rank)
      const what = late ? "slow" : rank.state
      const text = `rank ${rank.rank}, ${rank.node} slot ${rank.slot}, pid ${rank.pid}, ${rank.state}${
        rank.part && `, ${rank.part}`}${late ? `, ${digits(late.ratio)} x slower` : ""}`
      return <li class={`rank ${what}`} title={text}><a href={link("nodes", rank.node, { at })} aria-label={text}>
        {rank.rank}{late ? "▲" : rank.state === "member" ? "" : rank.state === "stopped" ? "✕" : "…"}</a></li>
    })}</ul>
    {task.ranks.length > known.length && <p class="empty">and {task.ranks.length - known.length} more</p>}
  </Section>
}

function Curves({ task, at_s }: { task: number; at_s: number | undefined }) {
  const { data, problem } = useGet("/v1/tasks/{task}/curves", { task })
  const isRead = data !== undefined && data.read_seq >= data.last_seq
  const marks = useGet("/v1/timeline", { task, buckets: 200 }).data?.incidents ?? []
  const faults = marks.filter(one => one.iteration !== null)
    .map(one => ({ x: one.iteration!, text: `inc-${one.id}` }))
  const shown = useMemo(() => {
    const begun = data?.layouts.filter(one => at_s === undefined || one.at_s <= at_s) ?? []
    return { x: data?.iterations ?? [], losses: [data?.losses ?? []], step_s: [data?.step_s ?? []], layouts: begun.reverse() }
  }, [data, at_s])
  const ofLoss = (data?.loss_marks ?? []).map(one => ({ x: one.iteration, text: one.what }))
  const seconds = (value: number) => span(value)
  return <>
    <Section title="Loss">
      <Trouble problem={problem} />
      {shown.x.length > 1 ? <Chart label={`Loss by iteration, ${faults.length} faults marked`} x={shown.x}
        values={shown.losses} marks={[...faults, ...ofLoss]}
        lines={[{ label: "loss", colour: "use-used", format: value => value.toPrecision(4) }]} />
        : <p class="empty">{isRead ? "No iteration so far." : "reading the log…"}</p>}
    </Section>
    {shown.x.length > 1 && <Section title="Iteration time">
      <Chart label={`Iteration time, ${faults.length} faults marked`} x={shown.x} values={shown.step_s} marks={faults}
        lines={[{ label: "time", colour: "use-detection", format: seconds }]} />
    </Section>}
    <Section title="Layouts over time">
      <Table label="Layouts" rows={shown.layouts} empty={isRead ? "No layout so far." : "reading the log…"} max={50} columns={[
        { name: "Since", cell: one => <Time at_s={one.at_s} /> },
        { name: "Iteration", right: true, cell: one => count(one.iteration) },
        { name: "Layout", cell: one => one.layout },
      ]} />
    </Section>
  </>
}

function Holders({ task }: { task: Task }) {
  const holding = task.ranks.filter(one => one.has_state)
  return <Section title="Who holds its state">
    <dl>
      <dt>ranks</dt><dd>{holding.length ? `${holding.length} ranks on ${new Set(holding.map(one => one.node)).size} nodes, iteration ${count(task.iteration)}` : "none"}</dd>
      <dt>memory</dt><dd>{task.copies.length
        ? task.copies.map(one => <div>iteration {count(one.step_version)} on {one.nodes.join(", ")}, {digits(one.copy_bytes / GIB)} GiB</div>)
        : task.no_copies || "no in-memory checkpoint"}</dd>
      <dt>disk</dt><dd>{task.checkpoint ? <>iteration {count(task.checkpoint_iteration)}: <code>{task.checkpoint}</code></> : "no checkpoint"}
        {task.not_published && <div>iteration {count(task.not_published.iteration)} is not published: loss {task.not_published.loss}</div>}</dd>
    </dl>
  </Section>
}

function Faults({ task, at, state }: { task: number; at: string; state: Schemas["View"] }) {
  const until_s = at ? state.cluster.at_s : Infinity
  const { data } = useGet("/v1/timeline", { task, buckets: 2000 })
  const rows = (data?.incidents ?? []).filter(one => one.at_s <= until_s).reverse()
  return <Section title="Faults and restarts">
    <Table label="Faults" rows={rows} empty={data ? "No fault so far." : "reading the log…"} columns={[
      { name: "Incident", cell: one => <a href={link("incident", one.id, { at })}>inc-{one.id}</a> },
      { name: "When", cell: one => <Time at_s={one.at_s} /> },
      { name: "Severity", cell: one => <Severity of={one.severity} /> },
      { name: "State", cell: one => <State of={one.outcome || "open"} /> },
      { name: "Cause", cell: one => one.why },
      { name: "Node", cell: one => one.node },
      { name: "Iteration", right: true, cell: one => one.iteration === null ? "" : count(one.iteration) },
    ]} />
  </Section>
}

const OUTPUT_CHARS_MAX = 100_000

/** The end of what a rank printed, read by the agent of its node. */
function Output({ task, mayRead }: { task: Task; mayRead: boolean }) {
  const [rank, setRank] = useState(task.ranks[0]?.rank ?? 0)
  const [asked, setAsked] = useState(false)
  const [text, setText] = useState("")
  const [problem, setProblem] = useState<Problem>()
  const one = task.ranks.find(each => each.rank === rank)
  const node = one?.node, file = one?.log_path
  useEffect(() => {
    if (!asked || !node || !file) return
    const stop = new AbortController()
    setText("")
    setProblem(undefined)
    const read = async () => {
      for (let offset = 0; !stop.signal.aborted;) {
        const part = await get("/v1/nodes/{node}/file", { node, file, offset }, stop.signal)
        const gap = part.begin > offset ? `\n[${count(part.begin - offset)} bytes were dropped here]\n` : ""
        setText(before => (before + gap + part.text).slice(-OUTPUT_CHARS_MAX))
        if (part.end === offset) await new Promise(done => { setTimeout(done, 2000) })
        offset = part.end < offset ? 0 : part.end // it was emptied
      }
    }
    read().catch((error: unknown) => { if (!stop.signal.aborted) setProblem(error as Problem) })
    return () => { stop.abort() }
  }, [asked, node, file])
  return <Section title="Output">
    {!mayRead && <p class="empty">What ranks print is not redacted: this needs the role operate.</p>}
    {mayRead && <p class="tools"><label>rank <select value={rank} onChange={event => { setRank(Number(event.currentTarget.value)) }}>
      {task.ranks.slice(0, 2048).map(each => <option value={each.rank}>{each.rank}</option>)}</select></label>
      <button type="button" onClick={() => { setAsked(!asked) }}>{asked ? "Stop" : "Read"}</button></p>}
    <Trouble problem={problem} />
    {asked && <pre tabIndex={0} aria-label={`Output of rank ${rank}`}>{text || "nothing so far"}</pre>}
  </Section>
}
