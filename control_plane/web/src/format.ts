/** Numbers and times in words. */

const SI = ["", "k", "M", "G", "T", "P", "E"]

/** A value with three digits and a prefix: `197 P`. */
export function si(value: number, unit = ""): string {
  if (!value) return `0 ${unit}`.trim()
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.abs(value)) / 3), 0), SI.length - 1)
  return `${digits(value / 1000 ** power)} ${SI[power]}${unit}`.trim()
}

export const digits = (value: number): string =>
  value.toLocaleString("en", { maximumSignificantDigits: 3 })

export const count = (value: number): string => Math.round(value).toLocaleString("en")

export const percent = (share: number): string => `${(100 * share).toFixed(1)} %`

/** A duration: `4.1 ms`, `3.2 s`, `5 min`, `2.5 h`, `3 d`. */
export function span(seconds: number): string {
  const size = Math.abs(seconds)
  if (size < 1) return `${digits(seconds * 1000)} ms`
  if (size < 120) return `${digits(seconds)} s`
  if (size < 7200) return `${digits(seconds / 60)} min`
  if (size < 172800) return `${digits(seconds / 3600)} h`
  return `${digits(seconds / 86400)} d`
}

let utc = localStorage.getItem("unicron-utc") === "1"
export const isUtc = () => utc
export function setUtc(on: boolean) {
  utc = on
  localStorage.setItem("unicron-utc", on ? "1" : "0")
}

const pad = (value: number, length = 2) => String(value).padStart(length, "0")

/** A time as `2026-11-28 02:10:07.412`, in the zone that was chosen or in UTC. */
export function time(at_s: number, inUtc = utc, fraction = 0): string {
  const at = new Date(at_s * 1000)
  const get = inUtc
    ? [at.getUTCFullYear(), at.getUTCMonth() + 1, at.getUTCDate(), at.getUTCHours(), at.getUTCMinutes(), at.getUTCSeconds()]
    : [at.getFullYear(), at.getMonth() + 1, at.getDate(), at.getHours(), at.getMinutes(), at.getSeconds()]
  const [year, month, day, hour, minute, second] = get as [number, number, number, number, number, number]
  const rest = fraction ? `.${pad(Math.floor((at_s % 1) * 10 ** fraction), fraction)}` : ""
  return `${year}-${pad(month)}-${pad(day)} ${pad(hour)}:${pad(minute)}:${pad(second)}${rest}`
}

export const zone = (inUtc = utc): string => inUtc ? "UTC" : Intl.DateTimeFormat().resolvedOptions().timeZone
