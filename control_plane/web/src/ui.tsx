/** Small parts that several views show. */
import type { ComponentChildren } from "preact"
import { useEffect, useMemo, useState } from "preact/hooks"
import type { Problem } from "./api"
import { count, span, time, zone, isUtc } from "./format"
import { change } from "./route"

/** A time in the chosen zone; its title has the other one. */
export function Time({ at_s, fraction = 0 }: { at_s: number; fraction?: number }) {
  return <time dateTime={new Date(at_s * 1000).toISOString()} title={`${time(at_s, !isUtc(), 3)} ${zone(!isUtc())}`}>
    {time(at_s, isUtc(), fraction)}</time>
}

export const Ago = ({ at_s, now_s }: { at_s: number; now_s: number }) =>
  <span title={`${time(at_s)} ${zone()}`}>{now_s - at_s < 1 ? "now" : `${span(now_s - at_s)} ago`}</span>

/** Words of the API, in which commands are between backquotes. */
export const Said = ({ text }: { text: string }) =>
  <span>{text.split("`").map((part, number) => number % 2 ? <code>{part}</code> : part)}</span>

/** A word with a colour and a sign: nothing is said by colour alone. */
const SIGNS: Record<string, [string, string]> = {
  running: ["good", "●"], healthy: ["good", "●"], healed: ["good", "✓"], finished: ["good", "✓"],
  saving: ["bad", "!"], finishing: ["good", "◐"], healing: ["warn", "↻"], degraded: ["warn", "▲"], starting: ["warn", "◐"],
  waiting: ["idle", "…"], cancelled: ["idle", "–"], left: ["idle", "–"], drained: ["idle", "⏏"],
  quarantined: ["bad", "⊘"], open: ["bad", "!"], failed: ["bad", "✕"], lost: ["bad", "✕"],
  unhealthy: ["bad", "✕"], unreachable: ["bad", "?"],
}
export function State({ of }: { of: string }) {
  const [kind, sign] = SIGNS[of] ?? ["idle", "·"]
  return <span class={`state ${kind}`}><span aria-hidden="true">{sign}</span> {of}</span>
}

export const Severity = ({ of }: { of: string }) => <span class={`severity ${of.toLowerCase()}`}>{of}</span>

export function Trouble({ problem }: { problem: Problem | undefined }) {
  if (!problem) return null
  return <p class="trouble" role="alert">{problem.message}{problem.hint && <> — <Said text={problem.hint} /></>}</p>
}

export const Section = ({ title, children, note }: { title: string; children: ComponentChildren; note?: ComponentChildren }) => {
  const id = `s-${title.toLowerCase().replace(/\W+/g, "-")}`
  return <section aria-labelledby={id}><h2 id={id}>{title}{note && <small> {note}</small>}</h2>{children}</section>
}

/** A long list that is drawn in parts, one a frame, so that input is answered in between. */
export function Growing<T>({ items, draw, part = 60 }: { items: T[]; draw: (item: T) => ComponentChildren; part?: number }) {
  const [num, setNum] = useState(part)
  const parts = useMemo((): ComponentChildren[] => [], [items])
  for (let from = parts.length * part; from < Math.min(num, items.length); from += part) {
    parts.push(<>{items.slice(from, from + part).map(draw)}</>)
  }
  useEffect(() => {
    if (num >= items.length) return
    let timer = 0
    const frame = requestAnimationFrame(() => { timer = window.setTimeout(() => { setNum(num + part) }) })
    return () => { cancelAnimationFrame(frame); clearTimeout(timer) }
  }, [num, items.length])
  return <>{parts}</>
}

export interface Column<R> { name: string; cell: (row: R) => ComponentChildren; right?: boolean }

/** A table that scrolls sideways on narrow screens; of many rows it shows the first `max`, and more on request. */
export function Table<R>({ label, columns, rows, empty, max = 200 }: {
  label: string; columns: Column<R>[]; rows: R[]; empty: string; max?: number
}) {
  const [pages, setPages] = useState(1)
  if (!rows.length) return <p class="empty">{empty}</p>
  const more = rows.length - pages * max
  return <>
    <div class="scroll" role="region" aria-label={label} tabIndex={0}>
      <table>
        <thead><tr>{columns.map(one => <th scope="col" class={one.right ? "right" : ""}>{one.name}</th>)}</tr></thead>
        <tbody><Growing items={rows.slice(0, pages * max)} draw={row =>
          <tr>{columns.map(one => <td class={one.right ? "right" : ""}>{one.cell(row)}</td>)}</tr>} /></tbody>
      </table>
    </div>
    {more > 0 && <p class="empty">and {count(more)} more <button type="button"
      onClick={() => { setPages(pages + 1) }}>Show {Math.min(more, max)}</button></p>}
  </>
}

/** Whether a text has all words of a filter. */
export const hasWords = (filter: string, text: string): boolean =>
  filter.toLowerCase().split(/\s+/).every(word => text.toLowerCase().includes(word))

/** The field of a filter, whose text is in the address. */
export function Filter({ of, text }: { of: string; text: string }) {
  return <p><label>Filter: {of} <input type="search" value={text} onInput={event => {
    change({ filter: event.currentTarget.value })
  }} /></label></p>
}

/** A word of the planner or the simulator, and what it means. */
export const Meaning = ({ of }: { of: string }) => <small> ({of})</small>
