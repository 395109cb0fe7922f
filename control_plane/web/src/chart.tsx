/** A line chart (uPlot), in the colours of the page. */
import { useEffect, useRef } from "preact/hooks"
import uPlot from "uplot"
import { colours, useDark } from "./colours"
import "uplot/dist/uPlot.min.css"

export interface Line { label: string; colour: string; format: (value: number) => string }
interface Props {
  label: string
  x: number[]
  lines: Line[]
  values: (number | null)[][]
  /** Whether x is a time in seconds; else it is a number, as of iterations. */
  isTime?: boolean
  marks?: { x: number; text: string }[]
  height?: number
}

export function Chart({ label, x, lines, values, isTime = false, marks = [], height = 180 }: Props) {
  const isDark = useDark()
  const place = useRef<HTMLDivElement>(null)
  useEffect(() => {
    const node = place.current!
    const colour = colours(node)
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } }
    const drawMarks = (plot: uPlot) => {
      plot.ctx.save()
      plot.ctx.fillStyle = colour("bad")
      plot.ctx.textAlign = "left"
      plot.ctx.font = `${11 * devicePixelRatio}px sans-serif`
      for (const one of marks) {
        const left = plot.valToPos(one.x, "x", true)
        plot.ctx.fillRect(left, plot.bbox.top, devicePixelRatio, plot.bbox.height)
        plot.ctx.fillText(`▼ ${one.text}`, left + 3, plot.bbox.top + 12 * devicePixelRatio)
      }
      plot.ctx.restore()
    }
    const plot = new uPlot({
      width: node.clientWidth, height, scales: { x: { time: isTime } }, hooks: { draw: [drawMarks] },
      axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map(one => lines[0]!.format(one)) }],
      series: [{}, ...lines.map(one => ({
        label: one.label, stroke: colour(one.colour), width: 1.5, spanGaps: true,
        value: (_: uPlot, value: number | null) => value === null ? "–" : one.format(value),
      }))],
    }, [x, ...values], node)
    const seen = new ResizeObserver(() => { plot.setSize({ width: node.clientWidth, height }) })
    seen.observe(node)
    return () => { seen.disconnect(); plot.destroy() }
  }, [x, values, marks.length, isDark])
  return <div class="chart" ref={place} role="img" aria-label={label} />
}
