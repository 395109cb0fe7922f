/** The nodes: a map by rack and switch, then a row for each. */
import { NodeActs } from "../acts"
import type { Schemas } from "../api"
import { useGet } from "../live"
import { link } from "../route"
import { Ago, Filter, Growing, hasWords, Section, Severity, State, Table, Time, Trouble } from "../ui"
import type { ViewProps } from "./index"

type Node = Schemas["NodeView"]

/** One word for a node: what matters most for its use. */
export function wordOf(node: Node): string {
  if (node.contact !== "heard") return node.contact
  if (node.quarantine) return "quarantined"
  if (node.drained) return "drained"
  return node.health
}

export function Nodes({ state, at, of, query, now_s, mayAct }: ViewProps) {
  const names = new Map(state.tasks.map(one => [one.id, one.name]))
  const places = new Map<string, Node[]>()
  const byName = new Intl.Collator("en", { numeric: true }).compare
  for (const node of [...state.nodes].sort((a, b) => byName(a.id, b.id))) {
    const place = [node.labels.switch, node.labels.rack].filter(Boolean).join(" / ") || "no rack or switch given"
    places.set(place, [...places.get(place) ?? [], node])
  }
  const rows = of ? state.nodes.filter(one => one.id === of)
    : state.nodes.filter(one => hasWords(query.filter ?? "", `${one.id} ${wordOf(one)} ${one.host}`)).sort((a, b) => Number(wordOf(a) === "healthy") - Number(wordOf(b) === "healthy") || byName(a.id, b.id))
  return <>
    <Section title="Map" note="by switch and rack; ■ a slot with a rank, □ a free one, ✕ one that is out">
      {state.nodes.length === 0 && <p class="empty">No node has joined.</p>}
      {[...places].map(([place, nodes]) => <div class="rack"><h3>{place}</h3>
        <ul class="map"><Growing items={nodes} draw={node => <NodeCell node={node} at={at} names={names} />} /></ul></div>)}
    </Section>
    <Section title={of ? `Node ${of}` : "All nodes"}>
      {of && <p><a href={link("nodes", "", { at })}>all nodes</a></p>}
      {!of && state.nodes.length > 20 && <Filter of="name, state, host" text={query.filter ?? ""} />}
      {of && mayAct && rows.map(one => <NodeActs node={one} />)}
      <Table label="Nodes" rows={rows} empty="No such node." max={of ? 1 : 100} columns={[
        { name: "Node", cell: one => <a href={link("nodes", one.id, { at })}>{one.id}</a> },
        { name: "State", cell: one => <State of={wordOf(one)} /> },
        { name: "Health since", cell: one => <Ago at_s={one.since_s} now_s={now_s} /> },
        { name: "Host", cell: one => one.host },
        { name: "Slots", right: true, cell: one => `${one.slots.filter(slot => slot.task).length} / ${one.num_slots}` },
        { name: "Tasks", cell: one => [...new Set(one.slots.filter(slot => slot.task).map(slot => names.get(slot.task) ?? slot.task))].join(", ") },
        { name: "Quarantine", cell: one => one.quarantine && <>{one.quarantine.why} until <Time at_s={one.quarantine.until_s} /></> },
        { name: "Drain", cell: one => one.drained ? one.drain_reason || "drained" : "" },
        { name: "Why", cell: one => [one.sick_why, one.reached_by.length ? `its machine is reached by ${one.reached_by.join(", ")}: its agent has stopped, or its link to the control plane is cut` : "", ...one.checks.map(check => `${check.check}: ${check.why}`),
          ...one.slots.filter(slot => slot.out).map(slot => `slot ${slot.index} out: ${slot.out_why}`),
          ...one.slots.filter(slot => slot.suspected_why && !slot.out).map(slot => `slot ${slot.index} suspected: ${slot.suspected_why}`)].filter(Boolean).join("; ") },
      ]} />
    </Section>
    {of && <History node={of} at={at} until_s={at ? state.cluster.at_s : Infinity} />}
  </>
}

/** The incidents of a node in the whole log, the newest first. */
function History({ node, at, until_s }: { node: string; at: string; until_s: number }) {
  const { data, problem } = useGet("/v1/timeline", { node, rows: 1, buckets: 2000 })
  const rows = (data?.incidents ?? []).filter(one => one.at_s <= until_s).reverse()
  return <Section title="Incidents of this node">
    <Trouble problem={problem} />
    <Table label="Incidents of this node" rows={rows} max={50} empty={data ? "No incident so far." : "reading the log…"} columns={[
      { name: "Incident", cell: one => <a href={link("incident", one.id, { at })}>inc-{one.id}</a> },
      { name: "When", cell: one => <Time at_s={one.at_s} /> },
      { name: "Severity", cell: one => <Severity of={one.severity} /> },
      { name: "State", cell: one => <State of={one.outcome || "open"} /> },
      { name: "Task", cell: one => one.task ? <a href={link("task", one.task, { at })}>task {one.task}</a> : "–" },
      { name: "What", cell: one => `${one.why}${one.num > 1 ? ` (and ${one.num - 1} more near it)` : ""}` },
    ]} />
  </Section>
}

const SIGNS: Record<string, string> = {
  healthy: "", degraded: "▲", unhealthy: "✕", unreachable: "?", lost: "✕", left: "–", drained: "⏏", quarantined: "⊘",
}

function NodeCell({ node, at, names }: { node: Node; at: string; names: Map<number, string> }) {
  const word = wordOf(node)
  const tasks = [...new Set(node.slots.filter(one => one.task).map(one => names.get(one.task) ?? one.task))].join(", ")
  const text = `${node.id}: ${word}, ${tasks || "no task"}`
  return <li class={`node ${word}`}><a href={link("nodes", node.id, { at })} title={text} aria-label={text}>
    <span>{node.id}{SIGNS[word] && ` ${SIGNS[word]}`}</span>
    <span class="slots" aria-hidden="true">{node.slots.slice(0, 16).map(slot => slot.out || word === "lost" || word === "left" ? "✕" : slot.task ? "■" : "□").join("")}</span>
  </a></li>
}
