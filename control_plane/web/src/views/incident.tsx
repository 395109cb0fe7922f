/** An incident: what broke, what Unicron did and why, what it cost, and what is left to do. */
import { ActButton } from "../acts"
import type { Schemas } from "../api"
import { count, si, span } from "../format"
import { useGet } from "../live"
import { link } from "../route"
import { Filter, hasWords, Meaning, Section, Severity, State, Table, Time, Trouble } from "../ui"
import { WhatIf } from "../what-if"
import type { ViewProps } from "./index"
import "./incident.css"

type Facts = Schemas["IncidentFacts"]
type Event = Schemas["Event"]

export function Incident({ state, at, of, query, mayAct }: ViewProps) {
  const newest = Math.max(0, ...state.incidents.map(one => one.id))
  const id = of.replace(/^inc-/, "") || String(newest || "")
  const { data, problem } = useGet("/v1/incidents/{incident}/facts", { incident: id, at }, id === "")
  if (id === "") return <p class="calm"><span aria-hidden="true">✓</span> Nothing has failed so far.</p>
  const facts = data && String(data.id) === id ? data : undefined
  return <>
    <Trouble problem={problem} />
    {problem && <p><a href={link("cluster", "", { at })}>The newest incidents</a></p>}
    {!facts && !problem && <p class="empty">reading the log…</p>}
    <Neighbours of={Number(id)} ids={state.incidents.map(one => one.id)} at={at} />
    {facts && <>
      <Head facts={facts} at={at} />
      <Bar facts={facts} />
      <Left facts={facts} mayAct={mayAct} />
      <div class="columns">
        <Decision facts={facts} at={at} />
        <Cost facts={facts} />
      </div>
      <Plans facts={facts} />
      <Effects facts={facts} />
      <WhatIf tasks={state.tasks} at_s={facts.detected_s} seq={facts.id} />
      <Records facts={facts} filter={query.filter ?? ""} />
    </>}
  </>
}

/** Links to the incidents before and after it, and its number, which the heading has only if the address has it. */
function Neighbours({ of, ids, at }: { of: number; ids: number[]; at: string }) {
  const to = (id: number | undefined, words: string) => id !== undefined && <> <a href={link("incident", id, { at })}>{words} inc-{id}</a></>
  return <p class="tools">inc-{of}{of === Math.max(...ids) && ", the newest"}
    {to(ids.filter(one => one < of).sort((a, b) => b - a)[0], "before it")}
    {to(ids.filter(one => one > of).sort((a, b) => a - b)[0], "after it")}</p>
}

function Head({ facts, at }: { facts: Facts; at: string }) {
  const who = facts.ranks.length ? `${facts.name}, ${facts.ranks.length === 1 ? "rank" : "ranks"} ${facts.ranks.join(" ")}` : facts.name
  return <p class="head">
    <State of={facts.outcome} /> <Severity of={facts.severity} /> <strong>{facts.status}</strong>, {facts.task
      ? <a href={link("task", facts.task, { at })}>{who}</a> : who}{facts.node && <> on {facts.node}</>}; detected
    {" "}<Time at_s={facts.detected_s} fraction={3} />
    {facts.part_of && <><br />part of: {facts.part_of}</>}
    {facts.on_purpose.map(one => <><br />on purpose: {String(one["what"])} (<Seq seq={Number(one["seq"])} />)</>)}
    {facts.acknowledged && <><br />{facts.acknowledged}</>}
  </p>
}

/** A record, as a link to that moment. */
const Seq = ({ seq }: { seq: number }) => <a href={link("cluster", "", { at: seq })} title="The cluster at that moment">{seq}</a>

const NAMES: Record<string, string> = { held: "paused", stood: "stalled", full: "regrow" }
const WORDS: Record<string, string> = {
  detect: "until it was known", decide: "until it was decided", rebuild: "until the ranks were connected again",
  step: "until the first iteration, which ends the pause", full: "until it had all slots of its plan, while it trained", held: "healing was paused", stood: "stalled",
  stopped: "stopped", silent: "the node was silent",
}

function Bar({ facts }: { facts: Facts }) {
  const total_s = facts.phases.reduce((sum, one) => sum + one.length_s, 0)
  const longest_s = Math.max(...facts.phases.map(one => one.length_s))
  return <Section title="How long it took" note={facts.cost.pause_s === null ? "it is not over" : `${span(facts.cost.pause_s)} pause`}>
    {facts.phases.length === 0 && <p class="empty">No phase is over yet.</p>}
    <ol class="phases">{facts.phases.map(one => <li class={one.name} style={{ flexGrow: Math.max(one.length_s / (total_s || 1), 0.02) }}>
      <i aria-hidden="true" /> <b>{NAMES[one.name] ?? one.name}</b>
      {" "}{one.bound && `${one.bound} `}{span(one.length_s)} <small>{WORDS[one.name] ?? ""}{
        facts.phases.length > 1 && one.length_s === longest_s && " (the longest)"}</small></li>)}</ol>
    {facts.began["why"] && <p class="empty">When it began: {facts.began["why"]}</p>}
  </Section>
}

function Left({ facts, mayAct }: { facts: Facts; mayAct: boolean }) {
  const open = facts.outcome === "open"
  return <Section title="Left to do">
    {facts.left.length === 0 && (open ? <p>It is still open: wait.</p>
      : <p class="calm"><span aria-hidden="true">✓</span> Nothing is left to do.</p>)}
    <ul class="needs">{facts.left.map(one => <li>{one}</li>)}</ul>
    {mayAct && !facts.acknowledged && facts.id > 0 && <p class="acts"><ActButton kind="ack" of={facts.id} />
      {facts.node !== "" && <ActButton kind="drain" of={facts.node} />}</p>}
  </Section>
}

function Decision({ facts, at }: { facts: Facts; at: string }) {
  const evidence = grouped(facts.evidence)
  return <Section title="Evidence and decision">
    <ol class="story">{evidence.map(([first, ...more]) => <li>
      <b>{who([first!, ...more])}</b>: {first!.kind}{more.length > 0 && ` (${more.length + 1} times)`}: {first!.what} <small>
        record <Seq seq={first!.seq} />{first!.later && ", after the decision"}</small></li>)}
      {facts.evidence_is_cut && <li class="empty">There may be more: {facts.evidence.length} are kept.</li>}
      {facts.decisions.map(one => <li class="decided"><b>decided</b>: <Severity of={one.severity} />: {one.why} <small>
        rule: {one.rule}; record <Seq seq={one.seq} /></small></li>)}
    </ol>
    {facts.stacks.map(one => <details class="kept"><summary>What rank {one.rank} on {one.node} did before it was ended{
      one.mark && `: ${one.mark}`}</summary>
      {one.stack ? <pre>{one.stack}</pre> : <p class="empty">No Python stack{one.why && `: ${one.why}`}.</p>}
      {one.stack && one.why && <p>{one.why}</p>}
      {one.nccl_ras && <><p>NCCL's RAS service says:</p><pre>{one.nccl_ras}</pre></>}
      {one.path && <p>All threads: <code>{one.path}</code> on {one.host || one.node}</p>}</details>)}
    {facts.dumps.length > 0 && <p>Flight recorders: {facts.dumps.map(one => <><br /><code>{
      `unicron locate ${String(one["folder"])}`}</code> on {String(one["node"])}</>)}</p>}
    <p>Compute it again: <code>{facts.verify}</code> <code>unicron incident {facts.id}</code>
      {at && <> <code>unicron replay --live --until {facts.seq}</code></>}</p>
  </Section>
}

const who = (alike: Event[]): string => {
  const names = [...new Set(alike.map(one => one.who))]
  return names.length > 3 ? `${names.length} nodes` : names.join(" ")
}

function grouped(events: Event[]): Event[][] {
  const found = new Map<string, Event[]>()
  for (const one of events) found.set(one.alike, [...found.get(one.alike) ?? [], one])
  return [...found.values()]
}

const ORIGINS: Record<string, string> = { peer: "a member", copy: "a copy in memory", checkpoint: "a checkpoint", seed: "begun again from the seed" }

function Cost({ facts }: { facts: Facts }) {
  const { cost } = facts
  const lost = cost.iterations_lost === null ? "unknown until the task prints one" : count(cost.iterations_lost)
  return <Section title="Cost">
    <dl>
      <dt>pause</dt><dd>{cost.pause_s === null ? "not over" : span(cost.pause_s)}</dd>
      <dt>iterations lost</dt><dd>{lost}</dd>
      <dt>slot time</dt><dd>{span(cost.slot_s)} of one slot{facts.outcome === "open" && " so far"}</dd>
      {(cost.kept > 0 || cost.dealt > 0) && <><dt>micro-batches</dt><dd>{count(cost.kept)} kept, {count(cost.dealt)} dealt to others</dd></>}
      <dt>state from</dt><dd>{cost.origin ? `${ORIGINS[cost.origin] ?? cost.origin}${cost.origin_node && ` on ${cost.origin_node}`}, ${
        si(cost.origin_bytes, "B")}, iteration ${count(cost.origin_step_version)}`
        : cost.peer_bytes ? `members, ${si(cost.peer_bytes, "B")}${cost.near_bytes ? `, of it ${si(cost.near_bytes, "B")} on the same node` : ""}`
          : cost.ckpt_read ? "a checkpoint" : "the members themselves; no checkpoint was read"}</dd>
      {facts.layouts.length > 0 && <><dt>layout</dt><dd>{facts.layouts.join(" → ")}</dd></>}
      {facts.lost && <><dt>lost</dt><dd>{facts.lost}</dd></>}
      {facts.no_copies && <><dt>no copy</dt><dd>{facts.no_copies}</dd></>}
      {facts.copies_gone.map(one => <><dt>no copy</dt><dd>{one.what} (<Seq seq={one.seq} />)</dd></>)}
    </dl>
  </Section>
}

/** The last record before the first evidence. */
const before = (facts: Facts) => Math.max(Math.min(facts.id, ...facts.evidence.map(one => one.seq), ...facts.timeline.map(one => one.seq)) - 1, 1)

const slots = (of: Record<string, number>) => Object.entries(of).map(([name, num]) => `${name} ${num}`).join(", ")

function Plans({ facts }: { facts: Facts }) {
  return <Section title="Plan that followed">
    {facts.plans.length === 0 && <p>{facts.outcome === "open" ? "No plan so far." : "The same slots: nothing was to be planned."}</p>}
    {facts.plans.map(one => <article>
      <p><b>{one.trigger}</b>: {count(one.num_slots)} slots: {Object.entries(one.slots).map(([name, [before, after]]) =>
        before === after ? `${name} ${after}` : `${name} ${before} → ${after}`).join(", ")}: WAF {si(one.waf, "FLOP/s")}
        {one.ideal_waf > 0 && ` of ${si(one.ideal_waf, "FLOP/s")} with every slot`}
        {one.origins.length > 0 && `, throughput ${one.origins.join(" and ")}`} <small>record <Seq seq={one.seq} /></small></p>
      {one.why && <p>Why: {one.why.replace(/^[^:]*: /, "")}; bound by {one.bound} <Meaning of="what keeps it from earning more" /></p>}
      <Table label={`Rejected by plan ${one.seq}`} max={8} rows={one.beaten} empty="It had no alternative." columns={[
        { name: "Rejected", cell: other => other.what },
        { name: "Slots", cell: other => slots(other.slots) },
        { name: "WAF", right: true, cell: other => si(other.waf, "FLOP/s") },
        { name: "Why not", cell: other => other.by },
      ]} />
    </article>)}
    {facts.waits.map(one => <p>{one["task"]} waits: {one["waits"]}{facts.computed_by > 0 && <small> (computed now, by decider version {facts.computed_by})</small>}</p>)}
    <p>The cluster <a href={link("cluster", "", { at: before(facts) })}>just before</a>
      {facts.plans.length > 0 && <>, <a href={link("cluster", "", { at: facts.plans.at(-1)!.seq })}>after the plan</a></>}
      {facts.outcome !== "open" && facts.timeline.length > 0 && <>, <a href={link("cluster", "", { at: facts.timeline.at(-1)!.seq })}>when it was over</a></>}</p>
  </Section>
}

function Effects({ facts }: { facts: Facts }) {
  return <Section title="Effect on each task">
    <Table label="Effect on each task" rows={facts.effects} empty="No task was touched." columns={[
      { name: "Task", cell: one => one.task },
      { name: "Faulted", cell: one => one.hurt ? "yes" : "no" },
      { name: "Slots", right: true, cell: one => one.slots === one.slots_before ? one.slots : `${one.slots_before} → ${one.slots}` },
      { name: "Pause", right: true, cell: one => one.slots === 0 ? "waits" : one.pause_s === null ? "not over" : span(one.pause_s) },
      { name: "Iterations lost", right: true, cell: one => one.iterations_lost ?? "?" },
      { name: "Slot time", right: true, cell: one => one.slot_s === null ? "?" : span(one.slot_s) },
    ]} />
  </Section>
}

/** On a phone they are shown on request: they are long. */
const NARROW = matchMedia("(max-width: 480px)")

function Records({ facts, filter }: { facts: Facts; filter: string }) {
  const shown = facts.timeline.filter(one =>
    hasWords(filter, `${one.seq} ${one.who} ${one.kind} ${one.name} ${one.rank ?? ""} ${one.what}`))
  return <Section title="Records" note={`${shown.length} of ${facts.timeline.length}`}>
    <details open={!NARROW.matches}><summary>The log of this incident</summary>
    <Filter of="node, kind, task, word" text={filter} />
    <Table label="Records of the incident" rows={shown} max={300} empty="No record has these words." columns={[
      { name: "+ time", right: true, cell: one => span(one.after_s) },
      { name: "Who", cell: one => one.who },
      { name: "What", cell: one => <>{one.other && <b>[{one.name}] </b>}<span class="kind">{one.kind}</span> {one.what}</> },
      { name: "Record", right: true, cell: one => <a href={link("cluster", "", { at: one.seq })} title="The cluster at that moment">{one.seq}</a> },
    ]} /></details>
  </Section>
}
