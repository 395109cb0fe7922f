/** What slots were used for and lost to, by day and cause; also as CSV. */
import type { Schemas } from "../api"
import { count, digits, percent, si, span } from "../format"
import { useGet } from "../live"
import { Meaning, Section, Table, Trouble } from "../ui"
import type { ViewProps } from "./index"

type Day = Schemas["HistoryDay"]
const HOUR_S = 3600

export function Costs({ at }: ViewProps) {
  const { data, problem } = useGet("/v1/history")
  const causes = Object.keys(data?.total.lost_slot_s ?? {})
  const rows = data ? [...data.days].reverse() : []
  const hours = (slot_s: number) => slot_s ? digits(slot_s / HOUR_S) : ""
  const faults = (day: Day) => Object.entries(day.incidents).map(([kind, num]) => `${num} ${kind}`).join(", ")
  return <>
    <Trouble problem={problem} />
    {at && <p class="empty">These are the figures of the whole log, whatever the moment shown.</p>}
    {data && <>
      <Section title="In all">
        <dl>
          <dt>slot time</dt><dd>{digits(data.total.slot_s / HOUR_S)} slot-hours</dd>
          <dt>used</dt><dd>{percent(data.total.used_slot_s / (data.total.slot_s || 1))}</dd>
          <dt>earned</dt><dd>{si(data.total.earned_flop, "FLOP")}, weighted
            <Meaning of="measured: the work of iterations that were finished for the first time" /></dd>
          <dt>expected</dt><dd>by the plans {si(data.total.planned_flop, "FLOP")}, ideal {si(data.total.ideal_flop, "FLOP")}
            <Meaning of="by the declared or modelled throughput, until it is measured" /></dd>
          <dt>faults</dt><dd>{count(data.total.faults)}{data.total.mtbf_slot_s && `, one each ${span(data.total.mtbf_slot_s)} of slot time`}</dd>
        </dl>
      </Section>
      <Section title="By day" note="slot-hours; days of UTC">
        <p><a download="unicron-costs.csv" href={`data:text/csv;charset=utf-8,${encodeURIComponent(csv(data.days, causes))}`}>as CSV</a></p>
        <Table label="Costs by day" rows={rows} empty="The log has no day." max={400} columns={[
          { name: "Day", cell: one => one.day },
          { name: "Used", right: true, cell: one => hours(one.used_slot_s) },
          { name: "Idle", right: true, cell: one => hours(one.idle_slot_s) },
          ...causes.map(cause => ({ name: cause, right: true, cell: (one: Day) => hours(one.lost_slot_s[cause] ?? 0) })),
          { name: "Faults", right: true, cell: one => one.faults || "" },
          { name: "Incidents", cell: faults },
          { name: "Earned (measured)", right: true, cell: one => si(one.earned_flop, "FLOP") },
        ]} />
      </Section>
    </>}
  </>
}

/** The days as CSV: slot seconds and weighted FLOP, unrounded. */
export function csv(days: Day[], causes: string[]): string {
  const head = ["day", "records", "slot_s", "used_slot_s", "idle_slot_s", ...causes.map(one => `lost_${one}_slot_s`),
    "faults", "earned_flop", "planned_flop", "ideal_flop"]
  const rows = days.map(one => [one.day, one.records, one.slot_s, one.used_slot_s, one.idle_slot_s,
    ...causes.map(cause => one.lost_slot_s[cause] ?? 0), one.faults, one.earned_flop, one.planned_flop, one.ideal_flop])
  return [head, ...rows].map(row => row.join(",")).join("\r\n") + "\r\n"
}
