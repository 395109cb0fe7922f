/** What slots did over time, a row for each task: drawn on a canvas, from a year to a second. */
import { useEffect, useRef, useState } from "preact/hooks"
import type { Schemas } from "./api"
import { colours, useDark } from "./colours"
import { digits, isUtc, span, time, zone } from "./format"

type Timeline = Schemas["TimelineAnswer"]
type Span = Timeline["free"][number]
export interface Window { from_s: number; to_s: number }

/** Uses in the order in which they are stacked; their colours are in style.css. */
export const USES = ["used", "redone", "transition", "rebuild", "decision", "detection", "waiting", "idle", "unavailable"] as const
const LABELS: Record<string, string> = {
  used: "steps", redone: "steps again", transition: "transition", rebuild: "rebuild", decision: "decision",
  detection: "detection", waiting: "free, a task waits", idle: "free", unavailable: "out",
}
const HATCHED = new Set(["redone", "rebuild", "detection", "decision", "unavailable"])
const ROW_PX = 26, GAP_PX = 5, AXIS_PX = 22, MARKS_PX = 18
export const WINDOW_S_MIN = 1
const STEPS_S = [1e-3, 1e-2, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400, 90 * 86400]

interface Props {
  data: Timeline
  window: Window
  at_s: number | undefined
  onWindow: (window: Window) => void
  onPick: (at_s: number) => void
}

export function Gantt({ data, window: shown, at_s, onWindow, onPick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null)
  const [width, setWidth] = useState(0)
  const [under, setUnder] = useState<{ x: number; text: string } | null>(null)
  const drag = useRef<{ x: number; window: Window; moved: boolean } | null>(null)
  const rows = [...data.rows, { task: 0, name: "free", spans: data.free }]
  useDark()
  const height = MARKS_PX + rows.length * (ROW_PX + GAP_PX) + AXIS_PX
  const gutter = Math.min(130, width * 0.28)
  const length_s = shown.to_s - shown.from_s
  const timeAt = (x: number) => shown.from_s + (x - gutter) / Math.max(width - gutter, 1) * length_s
  const limits: Window = { from_s: data.first_s, to_s: Math.max(data.read_s, data.first_s + WINDOW_S_MIN) }
  const move = (from_s: number, to_s: number) => { onWindow(bounded({ from_s, to_s }, limits)) }
  const zoom = (factor: number, around_s = (shown.from_s + shown.to_s) / 2) => {
    move(around_s - (around_s - shown.from_s) * factor, around_s + (shown.to_s - around_s) * factor)
  }

  useEffect(() => {
    const seen = new ResizeObserver(([entry]) => { setWidth(Math.floor(entry!.contentRect.width)) })
    seen.observe(canvas.current!.parentElement!)
    return () => { seen.disconnect() }
  }, [])
  useEffect(() => {
    if (width) draw(canvas.current!, rows, data.incidents, shown, at_s, width, height, gutter)
  })
  useEffect(() => {
    const wheel = (event: WheelEvent) => {
      event.preventDefault()
      const x = event.clientX - canvas.current!.getBoundingClientRect().left
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by_s = (event.deltaX || event.deltaY) / 600 * length_s
        move(shown.from_s + by_s, shown.to_s + by_s)
      } else zoom(Math.exp(event.deltaY / 300), timeAt(Math.max(x, gutter)))
    }
    const node = canvas.current!
    node.addEventListener("wheel", wheel, { passive: false })
    return () => { node.removeEventListener("wheel", wheel) }
  })

  const keys: Record<string, () => void> = {
    ArrowLeft: () => { move(shown.from_s - length_s / 4, shown.to_s - length_s / 4) },
    ArrowRight: () => { move(shown.from_s + length_s / 4, shown.to_s + length_s / 4) },
    "+": () => { zoom(0.5) }, "=": () => { zoom(0.5) }, "-": () => { zoom(2) },
    Home: () => { onWindow(limits) }, End: () => { move(limits.to_s - length_s, limits.to_s) },
  }
  const at = (event: PointerEvent) => event.clientX - canvas.current!.getBoundingClientRect().left
  const hover = (event: PointerEvent) => {
    const x = at(event)
    if (drag.current) {
      const by_s = (drag.current.x - x) / Math.max(width - gutter, 1) * length_s
      drag.current.moved ||= Math.abs(drag.current.x - x) > 4
      if (drag.current.moved) move(drag.current.window.from_s + by_s, drag.current.window.to_s + by_s)
      return
    }
    const y = event.clientY - canvas.current!.getBoundingClientRect().top - MARKS_PX
    const row = rows[Math.floor(y / (ROW_PX + GAP_PX))]
    const when_s = timeAt(x)
    const found = row?.spans.find(([from_s, to_s]) => from_s <= when_s && when_s < to_s)
    setUnder(x > gutter ? {
      x, text: `${time(when_s, isUtc(), length_s < 60 ? 3 : 0)}${found && row ? ` · ${row.name}: ${inWords(found)}` : ""}`,
    } : null)
  }

  return <div class="gantt">
    <div class="tools" role="toolbar" aria-label="Time shown">
      <button type="button" onClick={() => { zoom(0.5) }} aria-label="Zoom in">+</button>
      <button type="button" onClick={() => { zoom(2) }} aria-label="Zoom out">−</button>
      <button type="button" onClick={keys.ArrowLeft} aria-label="Earlier">◀</button>
      <button type="button" onClick={keys.ArrowRight} aria-label="Later">▶</button>
      <button type="button" onClick={() => { onWindow(limits) }}>All</button>
      {[["1 h", 3600], ["1 min", 60], ["1 s", 1]].map(([label, s]) =>
        <button type="button" onClick={() => {
          const end_s = at_s ?? limits.to_s
          move(end_s - Number(s), end_s + (at_s === undefined ? 0 : Number(s)))
        }}>{label}</button>)}
      <span class="range">{time(shown.from_s)} + {span(length_s)} ({zone()})</span>
    </div>
    <div class="canvas" tabIndex={0} role="group"
      aria-label="Slots by task over time. Arrow keys move, plus and minus zoom, Home shows all."
      onKeyDown={event => { const act = keys[event.key]; if (act) { event.preventDefault(); act() } }}>
      <canvas ref={canvas} style={{ width: `${width}px`, height: `${height}px` }} role="img"
        aria-label={`${data.rows.length} tasks, ${data.incidents.length} incidents; the table below has the same`}
        onPointerDown={event => {
          drag.current = { x: at(event), window: shown, moved: false }
          canvas.current!.setPointerCapture(event.pointerId)
        }}
        onPointerMove={hover}
        onPointerUp={event => {
          const was = drag.current
          drag.current = null
          if (was && !was.moved && at(event) > gutter) onPick(timeAt(at(event)))
        }}
        onPointerLeave={() => { setUnder(null) }} />
      {under && <div class="tip" style={{ left: `${Math.min(under.x, width - 220)}px` }}>{under.text}</div>}
    </div>
    <p class="legend">{USES.map(use => <span><i class={`use ${use}`} aria-hidden="true" />{LABELS[use]}</span>)}
      <span><b aria-hidden="true">▼</b> incident</span></p>
    {data.num_tasks > data.rows.length &&
      <p class="empty">and {data.num_tasks - data.rows.length} tasks with less slot time here</p>}
    <details><summary>As a table</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="Slots by task, as a table"><table>
        <thead><tr><th scope="col">Task</th><th scope="col">From</th><th scope="col">For</th><th scope="col">Slots</th></tr></thead>
        <tbody>{rows.flatMap(row => row.spans.slice(-100).map(one => <tr><td>{row.name}</td>
          <td>{time(one[0])}</td><td>{span(one[1] - one[0])}</td><td>{inWords(one)}</td></tr>)).slice(0, 300)}</tbody>
      </table></div></details>
  </div>
}

const inWords = ([, , slots]: Span): string =>
  USES.filter(use => slots[use]).map(use => `${digits(slots[use]!)} ${LABELS[use]}`).join(", ")

/** The window, not longer than the log, not shorter than a second, and within the log. */
export function bounded({ from_s, to_s }: Window, limits: Window): Window {
  const whole_s = limits.to_s - limits.from_s
  const length_s = Math.min(Math.max(to_s - from_s, WINDOW_S_MIN), Math.max(whole_s, WINDOW_S_MIN))
  const middle_s = (from_s + to_s) / 2
  const begin_s = Math.max(Math.min(middle_s - length_s / 2, limits.to_s - length_s), limits.from_s)
  return { from_s: begin_s, to_s: begin_s + length_s }
}

function draw(canvas: HTMLCanvasElement, rows: Timeline["rows"], incidents: Timeline["incidents"], shown: Window,
  at_s: number | undefined, width: number, height: number, gutter: number) {
  const scale = devicePixelRatio || 1
  canvas.width = width * scale
  canvas.height = height * scale
  const pen = canvas.getContext("2d")!
  const colour = colours(canvas)
  const x = (s: number) => gutter + (s - shown.from_s) / (shown.to_s - shown.from_s) * (width - gutter)
  pen.scale(scale, scale)
  pen.font = `12px ${getComputedStyle(canvas).fontFamily}`
  pen.textBaseline = "middle"
  const bottom = height - AXIS_PX

  const step_s = STEPS_S.find(one => (width - gutter) * one / (shown.to_s - shown.from_s) > 90) ?? 365 * 86400
  const offset_s = isUtc() ? 0 : -60 * new Date(shown.from_s * 1000).getTimezoneOffset()
  for (let s = Math.ceil((shown.from_s + offset_s) / step_s) * step_s - offset_s; s < shown.to_s; s += step_s) {
    pen.fillStyle = colour("line")
    pen.fillRect(x(s), MARKS_PX, 1, bottom - MARKS_PX)
    const text = time(s, isUtc(), step_s < 1 ? 3 : 0)
    pen.fillStyle = colour("muted")
    pen.fillText(step_s >= 86400 ? text.slice(0, 10) : step_s >= 60 ? text.slice(5, 16) : text.slice(11), x(s) + 3, height - AXIS_PX / 2)
  }
  rows.forEach((row, number) => {
    const top = MARKS_PX + number * (ROW_PX + GAP_PX)
    const most = Math.max(1, ...row.spans.map(([, , slots]) => Object.values(slots).reduce((a, b) => a + b, 0)))
    pen.fillStyle = colour("text")
    pen.save()
    pen.beginPath()
    pen.rect(0, top, gutter - 6, ROW_PX)
    pen.clip()
    pen.fillText(`${row.name}  ${digits(most)}`, 0, top + ROW_PX / 2)
    pen.restore()
    for (const [from_s, to_s, slots] of row.spans) {
      const left = Math.max(x(from_s), gutter), right = Math.max(Math.min(x(to_s), width), left + 1)
      let y = top + ROW_PX
      for (const use of USES) {
        const part = (slots[use] ?? 0) / most * ROW_PX
        if (!part) continue
        y -= part
        pen.fillStyle = colour(`use-${use}`)
        pen.fillRect(left, y, right - left, part)
        if (HATCHED.has(use)) hatch(pen, left, y, right - left, part, colour("surface"))
      }
    }
  })
  for (const one of incidents) {
    const left = x(one.at_s)
    if (left < gutter) continue
    pen.fillStyle = colour(one.outcome === "healed" ? "text" : "bad")
    pen.fillText(one.num > 1 ? `▼${one.num}` : "▼", left - 5, MARKS_PX / 2)
    pen.globalAlpha = 0.35
    pen.fillRect(left, MARKS_PX, 1, bottom - MARKS_PX)
    pen.globalAlpha = 1
  }
  if (at_s !== undefined && at_s >= shown.from_s && at_s <= shown.to_s) {
    pen.fillStyle = colour("accent")
    pen.fillRect(x(at_s) - 1, 0, 2, bottom)
  }
}

function hatch(pen: CanvasRenderingContext2D, left: number, top: number, width: number, height: number, colour: string) {
  if (width < 4) return
  pen.save()
  pen.beginPath()
  pen.rect(left, top, width, height)
  pen.clip()
  pen.strokeStyle = colour
  pen.lineWidth = 1
  pen.beginPath()
  for (let x = left - height; x < left + width; x += 5) {
    pen.moveTo(x, top + height)
    pen.lineTo(x + height, top)
  }
  pen.stroke()
  pen.restore()
}
