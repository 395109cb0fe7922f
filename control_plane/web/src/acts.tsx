/**
 * One dialog for every act. It says what the act will cost (a dry run), asks for a reason, and sends the
 * request on the condition that the plan's input is still that of the dry run.
 *
 * A view calls `act("drain", "n3")`, or shows `<ActButton kind="drain" of="n3" />`, if `mayAct` is true.
 */
import { render } from "preact"
import { useEffect, useRef, useState } from "preact/hooks"
import "./acts.css"
import { get, post, Problem, records, type Schemas } from "./api"
import { count, percent, si, span } from "./format"
import { link } from "./route"
import { Table, Time, Trouble } from "./ui"

type View = Schemas["View"]
type DryRun = Schemas["DryRunResult"]
type Record = Schemas["LogRecord"]
export type Change = Partial<Schemas["Change"]>
/** What an act is about: node names (with commas between), a task's or an incident's id, or a whole change. */
export type Target = string | number | Change
export type ActKind = "drain" | "undrain" | "lift" | "weight" | "cancel" | "apply" | "freeze" | "unfreeze" | "ack"

interface Entry {
  verb: string
  what: (of: string) => string
  /** The change that a dry run is made of; acts without one leave the plan as it is. */
  change?: (of: string, weight: number) => Change
  path?: (of: string) => string
  /** What a person should know besides the dry run. */
  note: (state: View, of: string) => string
}

const names = (of: string) => of.split(",")
const task = (state: View, of: string) => state.tasks.find(one => String(one.id) === of)

const ACTS: { [K in ActKind]: Entry } = {
  drain: { verb: "Drain", what: of => of, change: of => ({ without: names(of) }), note: (state, of) => {
    const ranks = state.nodes.filter(one => names(of).includes(one.id)).flatMap(one => one.slots.filter(slot => slot.task))
    return ranks.length ? `${ranks.length} ranks move away or stop. Tasks move between two iterations: none is lost.`
      : "No rank runs there."
  } },
  undrain: { verb: "Undrain", what: of => of, change: of => ({ undrain: names(of) }), note: () => "Tasks may use its slots again." },
  lift: { verb: "Lift", what: of => of, change: of => ({ lift: names(of) }),
    note: (state, of) => `Tasks may use its slots again, after a check of their devices, and its earlier faults no longer count. It is out for: ${
      state.nodes.filter(one => names(of).includes(one.id)).flatMap(one => [String(one.quarantine?.["why"] ?? ""),
        ...one.slots.map(slot => slot.out_why)]).filter(Boolean).join("; ") || "no reason"}` },
  weight: { verb: "Set the weight of", what: of => `task ${of}`, change: (of, weight) => ({ weights: { [of]: weight } }),
    note: () => "Only the ratio to the weights of other tasks counts." },
  cancel: { verb: "Cancel", what: of => `task ${of}`, change: of => ({ cancel: [of] }), note: (state, of) => {
    const one = task(state, of)
    return one ? `It ends at iteration ${count(one.iteration)}${one.iterations ? ` of ${count(one.iterations)}` : ""}, and ${
      one.unpublished ? `${count(one.unpublished)} iterations since its last checkpoint are lost.` : "what it has published stays."
    } It cannot be resumed.` : "It cannot be resumed."
  } },
  apply: { verb: "Apply", what: () => "this change", note: () => "" },
  freeze: { verb: "Freeze healing", what: () => "", path: () => "/v1/freeze", note: ({ cluster, tasks }) =>
    `Training goes on, and no order is given: a task that fails stands until you unfreeze. ${
      `Plans expect a fault each ${span(cluster.mtbf_gpu_s / Math.max(cluster.num_slots, 1))}, and ${cluster.num_faults} came so far; `}${
      si(Math.max(0, ...tasks.map(one => one.waf)), "FLOP/s")} of WAF stand still if the largest task fails.` },
  unfreeze: { verb: "Unfreeze healing", what: () => "", change: () => ({ unfreeze: true }),
    note: () => "What was held back is decided and ordered at once." },
  ack: { verb: "Acknowledge", what: of => `inc-${of}`, path: of => `/v1/incidents/${of}/ack`,
    note: () => "It costs nothing, and changes nothing that Unicron does. Others see that you know of it, and why." },
}

/** Open the dialog of an act. */
export function act(kind: ActKind, target: Target = ""): void {
  const host = document.body.appendChild(document.createElement("div"))
  const before = document.activeElement
  render(<Dialog kind={kind} target={target} onClose={() => {
    render(null, host)
    host.remove()
    if (before instanceof HTMLElement) before.focus()
  }} />, host)
}

export function ActButton({ kind, of = "", label }: { kind: ActKind; of?: Target; label?: string }) {
  return <button type="button" class="act" onClick={() => { act(kind, of) }}>{label ?? title(kind, of)}</button>
}

const isChange = (target: Target): target is Change => typeof target === "object"
const title = (kind: ActKind, target: Target) =>
  `${ACTS[kind].verb} ${ACTS[kind].what(isChange(target) ? "" : String(target))}`.trim()

interface Tried { result: DryRun; etag: string }

function Dialog({ kind, target, onClose }: { kind: ActKind; target: Target; onClose: () => void }) {
  const entry = ACTS[kind]
  const of = isChange(target) ? "" : String(target)
  const dialog = useRef<HTMLDialogElement>(null)
  const [state, setState] = useState<View>()
  const [weight, setWeight] = useState("")
  const [reason, setReason] = useState("")
  const [tried, setTried] = useState<Tried>()
  const [problem, setProblem] = useState<Problem>()
  const [since, setSince] = useState<Record[]>()
  const [busy, setBusy] = useState(false)
  const [seq, setSeq] = useState(0)
  const asked = Number(weight)
  const change = isChange(target) ? target : entry.change?.(of, asked)
  const ready = kind !== "weight" || (weight.trim() !== "" && asked > 0)
  const key = ready && change ? JSON.stringify(change) : ""

  const tryIt = async (): Promise<void> => {
    const { answer, etag } = await post<DryRun>("/v1/plan/dry-run", change!)
    setTried({ result: answer, etag })
  }
  useEffect(() => {
    dialog.current!.showModal()
    get("/v1/state").then(found => {
      setState(found)
      const one = task(found, of)
      if (kind === "weight" && one) setWeight(String(one.weight))
    }, setProblem)
  }, [])
  useEffect(() => {
    setTried(undefined)
    if (!key) return
    let is_over = false
    setProblem(undefined)
    const timer = setTimeout(() => {
      post<DryRun>("/v1/plan/dry-run", JSON.parse(key) as object).then(
        ({ answer, etag }) => { if (!is_over) setTried({ result: answer, etag }) },
        (error: unknown) => { if (!is_over) setProblem(error as Problem) })
    }, 200)
    return () => { is_over = true; clearTimeout(timer) }
  }, [key])

  const send = async () => {
    const once = { "Idempotency-Key": crypto.getRandomValues(new Uint32Array(4)).join("-") }
    if (!change) return await post<Schemas["Written"]>(entry.path!(of), { reason }, once)
    return await post<Schemas["Written"]>("/v1/plan/apply", { change, reason }, { ...once, "If-Match": tried!.etag })
  }
  const doIt = async () => {
    setBusy(true)
    setProblem(undefined)
    try {
      setSeq((await send()).answer.seq)
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 412) setProblem(error as Problem)
      else {
        setSince(await records({ after: tried!.result.seq }).catch(() => []))
        await tryIt().catch((again: unknown) => { setTried(undefined); setProblem(again as Problem) })
      }
    }
    setBusy(false)
  }
  const may = Boolean(state) && reason.trim() !== "" && ready && (!change || Boolean(tried)) && !busy
  return <dialog ref={dialog} class="act" aria-labelledby="act-title" onClose={onClose}>
    <h2 id="act-title">{title(kind, target)}{kind !== "ack" && state && task(state, of) && ` (${task(state, of)!.name})`}</h2>
    {seq > 0 ? <>
      <p role="status" class="calm">✓ It is record <a href={link("cluster", "", { at: seq })}
        onClick={() => { dialog.current!.close() }}>{count(seq)}</a> of the log. What follows comes behind it.</p>
      <div class="tools"><button type="button" ref={focused} onClick={() => { dialog.current!.close() }}>Close</button></div>
    </> : <form onSubmit={event => { event.preventDefault(); if (may) void doIt() }}>
      {state && <p>{entry.note(state, of)}</p>}
      {kind === "weight" && <p><label>Weight <input type="number" min="0" step="any" required value={weight}
        onInput={event => { setWeight(event.currentTarget.value) }} /></label></p>}
      {change && !tried && !problem && <p class="empty" role="status">computing what it costs…</p>}
      {since && <Since found={since} />}
      {tried && <Cost found={tried.result} />}
      <Trouble problem={problem} />
      <p><label>Reason, for the log <input value={reason} maxLength={200} required autofocus autocomplete="off"
        onInput={event => { setReason(event.currentTarget.value) }} /></label></p>
      <div class="tools">
        <button type="submit" class="main" disabled={!may}>{since ? "Do it all the same" : title(kind, target)}</button>
        <button type="button" onClick={() => { dialog.current!.close() }}>Leave it</button>
      </div>
    </form>}
  </dialog>
}

/** `autofocus` counts only when a dialog opens. */
const focused = (button: HTMLElement | null) => { button?.focus() }

/** What a dry run found: also of use beside a form. */
export function Cost({ found }: { found: DryRun }) {
  const sum = (name: "waf" | "waf_before") => found.tasks.reduce((all, one) => all + one[name], 0)
  const before = sum("waf_before"), gain = sum("waf") - before
  const moved = found.tasks.filter(one => one.slots !== one.slots_before || one.pause_s > 0 || one.task === 0)
  const others = found.tasks.length - moved.length
  return <div class="cost" role="status">
    {found.held && <p class="trouble">Healing is off ({found.held}): nothing is ordered until it is on.</p>}
    {!found.planned && <p>No new plan follows: each task keeps its slots.</p>}
    {found.planned && found.plan && <>
      <p><strong>{gain ? `${gain > 0 ? "+" : "−"}${si(Math.abs(gain), "FLOP/s")} of WAF` : "The same WAF"}
        {gain !== 0 && before > 0 && ` (${gain > 0 ? "+" : "−"}${percent(Math.abs(gain) / before)})`}</strong>; the changes are expected to cost
        {" "}{si(found.transition_flop, "FLOP")}{found.num_plans === 1 && found.plan.paid_back_s
          ? `, earned back after ${span(found.plan.paid_back_s)}` : ""}. {found.plan.why}</p>
      <Table label="Tasks that change" rows={moved} max={20} empty="No task changes." columns={[
        { name: "Task", cell: one => one.name },
        { name: "Slots", right: true, cell: one => arrow(one.slots_before, one.slots, String) },
        { name: "Layout", cell: one => arrow(one.layout_before, one.layout, String) },
        { name: "WAF", right: true, cell: one => arrow(one.waf_before, one.waf, value => si(value)) },
        { name: "Expected pause", right: true, cell: one => one.pause_s ? span(one.pause_s) : "–" },
        { name: "", cell: one => one.waits },
      ]} />
      {moved.length > 0 && others > 0 && <p class="empty">{others} other {others === 1 ? "task stays" : "tasks stay"} as {others === 1 ? "it is" : "they are"}.</p>}
    </>}
  </div>
}

function arrow<V>(before: V, after: V, show: (value: V) => string): string {
  return before === after ? show(after) : `${show(before) || "–"} → ${show(after) || "–"}`
}

/** Records that may have changed the plan's input: not progress, not orders' answers. */
const QUIET = /^(TaskProgressed|IterationsLogged|MemoryCheckpoint|Checkpoint|Order|Earned|Straggler|Notified)/

function Since({ found }: { found: Record[] }) {
  const asked = (one: Record) => Number(Boolean((one.body as { who?: string }).who))
  // What people asked for comes first, then what was measured; the newest at the top.
  const shown = found.filter(one => !QUIET.test(one.kind)).reverse().sort((a, b) => asked(b) - asked(a))
  return <div role="alert">
    <p><strong>Not done: something has changed since the costs were shown.</strong> Below is what it would cost now.</p>
    <Table label="What has changed" rows={shown} max={8} empty="No record of weight came since." columns={[
      { name: "When", cell: one => <Time at_s={one.at_s} /> },
      { name: "Record", cell: one => `${one.seq} ${one.kind}` },
      { name: "Who", cell: one => String((one.body as { who?: string }).who ?? one.source) },
      { name: "What", cell: one => described(one.body) },
    ]} />
  </div>
}

function described(body: object): string {
  const parts = Object.entries(body).filter(([name, value]) => name !== "who" && name !== "role"
    && (typeof value === "string" || typeof value === "number") && value !== "")
  return parts.map(([name, value]) => `${name} ${String(value)}`).join(", ").slice(0, 160)
}

/** What can be done here about something that needs a person. */
export function NeedActs({ need }: { need: Schemas["View"]["needs"][number] }) {
  const { what, node, incident } = need as Schemas["Need"]
  return <span class="acts">
    {what === "healing" && need["why"]?.toString().includes("frozen") && <ActButton kind="unfreeze" />}
    {what === "drained" && node && <ActButton kind="undrain" of={node} />}
    {(what === "quarantined" || what === "disabled") && node && <ActButton kind="lift" of={node} />}
    {(what === "degraded" || what === "unhealthy") && node && <ActButton kind="drain" of={node} />}
    {incident > 0 && <ActButton kind="ack" of={incident} />}
  </span>
}

/** Acts on a node: those that its state allows. */
export function NodeActs({ node }: { node: Schemas["NodeView"] }) {
  return <span class="acts">
    <ActButton kind={node.drained ? "undrain" : "drain"} of={node.id} />
    {(node.quarantine || node.slots.some(slot => slot.out_why)) && <ActButton kind="lift" of={node.id} />}
  </span>
}

/** Acts on a task that has not ended. */
export function TaskActs({ of }: { of: Schemas["TaskView"] }) {
  if (["finished", "failed", "cancelled"].includes(of.state)) return null
  return <span class="acts"><ActButton kind="weight" of={of.id} /><ActButton kind="cancel" of={of.id} /></span>
}
