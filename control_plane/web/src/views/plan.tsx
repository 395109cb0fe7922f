/** The plan, what it beat, and what it would be after a change: the form of `unicron plan`. */
import { useState } from "preact/hooks"
import { ActButton } from "../acts"
import { post, type Problem, type Schemas } from "../api"
import { digits, percent, si, span } from "../format"
import { useGet } from "../live"
import { link } from "../route"
import { Meaning, Section, Table, Time, Trouble } from "../ui"
import type { ViewProps } from "./index"

type Result = Schemas["DryRunResult"]
export type Change = Partial<Schemas["Change"]>

export function PlanPage({ state, at, mayAct }: ViewProps) {
  const { data, problem } = useGet("/v1/plan", { at })
  return <>
    <Section title="In force" note={data?.plan && data.plan_s > 0 && <>since <Time at_s={data.plan_s} />, record {data.plan_seq}</>}>
      <Trouble problem={problem} />
      {data && <Shown result={data} at={at} />}
    </Section>
    {at ? <p class="empty">A change is tried on the present: go to it for the form.</p> : <WhatIf state={state} mayAct={mayAct} />}
  </>
}

/** A plan's tasks and its alternatives, the best first. */
export function Shown({ result, at }: { result: Result; at: string }) {
  const { plan, tasks } = result
  if (!plan) return result.plan_seq === 0 ? <p class="empty">No plan so far.</p>
    : <p>No plan is in force: every task has ended. The last one is record{" "}
      <a href={link("plan", "", { at: result.plan_seq })}>{result.plan_seq}</a>, of <Time at_s={result.plan_s} />.</p>
  const best = plan.alternatives[0]
  return <>
    <p>{plan.why || plan.trigger}{best && <>; next: {best.what}, {si(best.waf, "FLOP/s")}</>}</p>
    <Table label="Plan by task" rows={tasks} empty="No task." columns={[
      { name: "Task", cell: one => <a href={link("task", one.task, { at })}>{one.name}</a> },
      { name: "Weight", right: true, cell: one => one.weight },
      { name: "Slots", right: true, cell: one => one.slots_before === one.slots ? one.slots : `${one.slots_before} → ${one.slots}` },
      { name: "Layout", cell: one => one.layout_before && one.layout_before !== one.layout ? `${one.layout_before} → ${one.layout}` : one.layout },
      { name: "WAF", right: true, cell: one => one.waf_before === one.waf ? si(one.waf) : `${si(one.waf_before)} → ${si(one.waf)}` },
      { name: "Expected pause", right: true, cell: one => one.pause_s ? span(one.pause_s) : "" },
      { name: "Why it waits", cell: one => one.waits },
    ]} />
    <Table label="Alternatives" rows={plan.alternatives} empty="No alternative." columns={[
      { name: "Alternative", cell: one => one.what },
      { name: "WAF", right: true, cell: one => si(one.waf, "FLOP/s") },
      { name: "Behind", right: true, cell: one => percent(one.behind_share || one.behind_flop / (plan.objective_flop || 1)) },
    ]} />
    <dl>
      <dt>all</dt><dd>{si(plan.waf, "FLOP/s")} on {plan.num_slots} slots; ideal {si(plan.ideal_waf, "FLOP/s")}</dd>
      <dt>bound by</dt><dd>{plan.bound || "–"}<Meaning of="what keeps the plan from earning more" />{result.more_slots > 0 && `; ${result.more_slots} slots more would earn ${si(result.more_waf, "FLOP/s")}`}</dd>
      {plan.paid_back_s > 0 && <><dt>paid back in</dt><dd>{span(plan.paid_back_s)}</dd></>}
      <dt>horizon</dt><dd>{span(plan.running_s)}<Meaning of="how long a plan is expected to last, until the next fault: so long it has to earn what its changes cost" /></dd>
      <dt>transition</dt><dd>{si(result.transition_flop, "FLOP")}<Meaning of="what is not earned while tasks change" /></dd>
    </dl>
  </>
}

function WhatIf({ state, mayAct }: { state: Schemas["View"]; mayAct: boolean }) {
  const [without, setWithout] = useState("")
  const [slots, setSlots] = useState(0)
  const [weights, setWeights] = useState<Record<string, string>>({})
  const [tried, setTried] = useState<Result>()
  const [problem, setProblem] = useState<Problem>()
  const [busy, setBusy] = useState(false)
  const live = state.tasks.filter(one => !["finished", "failed", "cancelled"].includes(one.state))
  const change: Change = {
    slots, without: without.split(/[\s,]+/).filter(Boolean),
    weights: Object.fromEntries(Object.entries(weights).filter(([, text]) => text !== "").map(([task, text]) => [task, Number(text)])),
  }
  const send = async () => {
    setBusy(true)
    setProblem(undefined)
    setTried(undefined)
    try {
      setTried((await post<Result>("/v1/plan/dry-run", change)).answer)
    } catch (error) {
      setProblem(error as Problem)
    }
    setBusy(false)
  }
  return <Section title="What if" note="a dry run: nothing is changed">
    <form class="form" onSubmit={event => { event.preventDefault(); void send() }}>
      <label>without nodes <input value={without} placeholder="n3, n7" onInput={event => { setWithout(event.currentTarget.value) }} /></label>
      <label>with more slots <input type="number" min={0} max={100000} value={slots}
        onInput={event => { setSlots(Number(event.currentTarget.value)) }} /></label>
      <fieldset><legend>weights</legend>{live.slice(0, 50).map(one => <label>{one.name}{" "}
        <input type="number" min={0} step="any" placeholder={digits(one.weight)} value={weights[one.id] ?? ""}
          onInput={event => { setWeights({ ...weights, [one.id]: event.currentTarget.value }) }} /></label>)}</fieldset>
      <button type="submit" disabled={busy}>{busy ? "planning…" : "Try"}</button>
    </form>
    <Trouble problem={problem} />
    {tried && <div role="status"><h3>It would be</h3><Shown result={tried} at="" />
      {mayAct && !slots && <ActButton kind="apply" of={change} label="Apply…" />}</div>}
  </Section>
}
