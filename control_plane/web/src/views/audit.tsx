/** Who asked for what: the requests of operators, newest first. */
import { useEffect, useState } from "preact/hooks"
import { lines, type Problem, type Schemas } from "../api"
import { live } from "../live"
import { Section, Table, Time, Trouble } from "../ui"
import type { ViewProps } from "./index"

type Record = Schemas["LogRecord"]
const PAGE_NUM = 200
const HIDDEN = new Set(["who", "role", "reason", "spec", "modelled"])

export function Audit({ state, at }: ViewProps) {
  const [rows, setRows] = useState<Record[]>()
  const [problem, setProblem] = useState<Problem>()
  const [num, setNum] = useState(PAGE_NUM)
  useEffect(() => {
    const stop = new AbortController()
    lines({ requests: 1, newest: num }, stop.signal).then(setRows, (error: unknown) => { if (!stop.signal.aborted) setProblem(error as Problem) })
    const end = live.listen(() => {
      const last = live.recent.filter(one => "who" in (one.body as object))
      setRows(before => before && [...before, ...last.filter(one => one.seq > (before.at(-1)?.seq ?? 0))])
    })
    return () => { stop.abort(); end() }
  }, [num])
  const shown = rows?.filter(one => !at || one.seq <= state.cluster.seq).reverse()
  return <Section title="Requests" note="by whose token, and why">
    <Trouble problem={problem} />
    {!shown && !problem && <p class="empty">reading the log…</p>}
    {shown && <Table label="Requests" rows={shown} empty="Nobody has asked for anything." max={num} columns={[
      { name: "Record", right: true, cell: one => one.seq },
      { name: "When", cell: one => <Time at_s={one.at_s} /> },
      { name: "Who", cell: one => `${text(one, "who") || "–"} ${text(one, "role") && `(${text(one, "role")})`}` },
      { name: "What", cell: one => one.kind },
      { name: "Of what", cell: one => Object.entries(one.body as object).filter(([name, value]) => !HIDDEN.has(name) && value !== null && value !== false && value !== "")
        .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : String(value)}`).join(", ") || subject(one) },
      { name: "Reason", cell: one => text(one, "reason") },
    ]} />}
    {shown && shown.length >= num && <button type="button" onClick={() => { setNum(num + PAGE_NUM) }}>Show older ones</button>}
  </Section>
}

const text = (one: Record, name: string): string => String((one.body as { [key: string]: unknown })[name] ?? "")
const subject = (one: Record): string => (one.body as { spec?: { name?: string } }).spec?.name ?? ""
