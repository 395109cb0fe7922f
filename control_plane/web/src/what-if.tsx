/** What other weights, spares or policies would have done: the simulator's answer, on request. */
import { useEffect, useState } from "preact/hooks"
import { get, post, Problem, type Schemas } from "./api"
import { count, percent, si, span } from "./format"
import { Meaning, Section, Table, Trouble } from "./ui"

type Answer = Schemas["WhatIfAnswer"]
type Played = Schemas["Played"]
const POLL_MS = 500
const POLICIES: Record<string, string> = {
  megatron: "the whole job starts again when its own node is repaired",
  spares: "an idle node takes over, and the job restarts in its processes",
  shrink: "the job goes on with its remaining replicas",
  requeue: "the whole job starts again on free nodes, if there are enough",
}
const total = (of: Record<string, number>) => Object.values(of).reduce((sum, one) => sum + one, 0)

/** `at_s`, `seq`: when the incident was detected whose loss is shown beside the totals. */
export function WhatIf({ tasks, at_s, seq }: { tasks: Schemas["View"]["tasks"]; at_s: number; seq: number }) {
  const [answer, setAnswer] = useState<Answer>()
  const [problem, setProblem] = useState<Problem>()
  const [weights, setWeights] = useState<Record<string, string>>({})
  const [spare, setSpare] = useState(false)
  const [policies, setPolicies] = useState<string[]>(["megatron"])
  const runs = answer?.state === "reading" || answer?.state === "simulating"
  useEffect(() => { get("/v1/what-if").then(setAnswer, () => undefined) }, [])
  useEffect(() => {
    if (!runs) return
    const timer = setInterval(() => { get("/v1/what-if").then(setAnswer, setProblem) }, POLL_MS)
    return () => { clearInterval(timer) }
  }, [runs])
  const names = [...new Set(tasks.map(one => one.name))].slice(0, 8)
  const start = () => {
    setProblem(undefined)
    const asked = Object.entries(weights).filter(([, value]) => Number(value) > 0)
    post<Answer>("/v1/what-if", {
      weights: Object.fromEntries(asked.map(([name, value]) => [name, Number(value)])),
      fields: spare ? { hot_spare: true } : {}, policies,
    }).then(({ answer: begun }) => { setAnswer(begun) }, (error: unknown) => { setProblem(error as Problem) })
  }
  return <Section title="What other choices would have done" note="the log so far, simulated again">
    <form class="what-if" onSubmit={event => { event.preventDefault(); start() }}>
      <fieldset><legend>Policies</legend>{Object.entries(POLICIES).map(([name, meaning]) => <label><input type="checkbox" checked={policies.includes(name)}
        onChange={event => { setPolicies(event.currentTarget.checked ? [...policies, name] : policies.filter(one => one !== name)) }} /> {name}<Meaning of={meaning} /></label>)}</fieldset>
      <fieldset><legend>Spare</legend><label><input type="checkbox" checked={spare}
        onChange={event => { setSpare(event.currentTarget.checked) }} /> keep a hot spare<Meaning of="slots that the next fault needs stay free" /></label></fieldset>
      {names.length > 0 && <fieldset><legend>Weights</legend>{names.map(name => <label>{name} <input type="number" min="0" step="any"
        placeholder={String(tasks.find(one => one.name === name)!.weight)} value={weights[name] ?? ""}
        onInput={event => { setWeights({ ...weights, [name]: event.currentTarget.value }) }} /></label>)}</fieldset>}
      <button type="submit" disabled={runs}>Simulate</button>
    </form>
    <Trouble problem={problem} />
    <div role="status" aria-live="polite">{answer && <Progress answer={answer} />}</div>
    {answer?.result && <Result answer={answer} result={answer.result} at_s={at_s} seq={seq} />}
  </Section>
}

function Progress({ answer }: { answer: Answer }) {
  if (answer.state === "reading") return <p>Reading the log: {percent(answer.read_seq / Math.max(answer.last_seq, 1))}
    {" "}<progress aria-label="Records read" max={answer.last_seq} value={answer.read_seq} /></p>
  if (answer.state === "simulating") {
    const since_s = Math.max(Date.now() / 1000 - answer.began_s, 0)
    return <p>Simulating {count(answer.last_seq)} records since {span(since_s)}, at most {span(answer.limit_s)}
      {" "}<progress aria-label="Time of the limit" max={answer.limit_s} value={since_s} /></p>
  }
  if (answer.state === "failed") return <p class="trouble">It failed: {answer.why}</p>
  return null
}

/** A choice in words: `unicron weight.alpha=2 policy.hot_spare=true`. */
const words = (one: Played): string => [one.policy,
  ...Object.entries(one.weights).map(([name, weight]) => `weight of ${name} ${weight}`),
  ...Object.entries(one.fields).map(([name, value]) => name === "hot_spare" ? (value ? "with a hot spare" : "without a hot spare") : `${name} ${String(value)}`),
].join(", ")

const flop = (value: number) => si(Math.abs(value) < 1 ? 0 : value, "FLOP")

function Result({ answer, result, at_s, seq }: { answer: Answer; result: Schemas["WhatIfResult"]; at_s: number; seq: number }) {
  const away_s = (number: number) => Math.abs(result.recorded.incidents[number]!.at_s + result.began_s - at_s)
  const place = seq > answer.last_seq ? undefined
    : [...result.recorded.incidents.keys()].sort((a, b) => away_s(a) - away_s(b))[0]
  /** What this incident lost: each choice has the same events. */
  const loss = (played: Played) => place === undefined ? undefined : played.incidents[place]
  const rows: [string, Played][] = [["recorded", result.recorded],
    ...result.choices.map((one, number): [string, Played] => [number === 0 ? "simulated, as recorded" : words(one), one])]
  const here = loss(result.recorded)
  const isWeighted = result.choices.some(one => Object.keys(one.weights).length > 0)
  return <>
    <p>The last simulation, until record {count(answer.last_seq)}: {span(result.horizon_s)} of training, in {span(answer.took_s)}.
      {here && <> This incident is {here.what}.</>}{seq > answer.last_seq && <> This incident came later: simulate again.</>}</p>
    <Table label="What other choices would have done" rows={rows} empty="" columns={[
      { name: "Choice", cell: ([name]) => name },
      { name: "Earned", right: true, cell: ([, one]) => flop(one.accumulated_waf_flop) },
      { name: "Against simulated", right: true, cell: ([name, one]) => {
        const against = one.accumulated_waf_flop - one.difference_flop
        return name === "recorded" || !against ? "" : `${one.difference_flop > 0 ? "+" : ""}${percent(one.difference_flop / against)}`
      } },
      { name: "Down", right: true, cell: ([, one]) => span(total(one.downtime_task_s)) },
      { name: "Slot time lost", right: true, cell: ([, one]) => span(Math.max(total(one.lost_slot_s), 0)) },
      { name: "This incident lost", right: true, cell: ([, one]) => flop(Math.max(loss(one)?.lost_waf_flop ?? 0, 0)) },
      { name: "Time to full strength", right: true, cell: ([, one]) => {
        const found = loss(one)
        return !found ? "" : found.full_after_s !== null ? span(found.full_after_s)
          : found.lost_waf_flop > 1 ? "not by the end" : "–"
      } },
    ]} />
    <p class="empty">Earned is by the declared, modelled or calibrated throughput, not measured as on the page of costs:
      compare rows with each other.{isWeighted && " A row with other weights is compared with the simulated run counted by these weights."} An incident loses what comes on top of earlier losses: 0 FLOP and “–” mean that
      its tasks stood still already, or that it cost nothing. Full strength is what each task earned before; “not by
      the end”: it was not reached before record {count(answer.last_seq)}.</p>
    {result.evidence.filter(line => line.includes("longer than the horizon")).map(line => <p class="needs-line">{line}</p>)}
    <details><summary>What this rests on</summary><ul>{result.evidence.map(line => <li>{line}</li>)}</ul></details>
  </>
}
