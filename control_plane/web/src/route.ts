/** The address: `#/task/5?at=123`. Every view and moment has one that can be pasted into a ticket. */
import { useEffect, useState } from "preact/hooks"

export interface Route { view: string; of: string; query: Record<string, string> }

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?")
  const [view = "", of = ""] = path.split("/")
  let decoded = of
  try { decoded = decodeURIComponent(of) } catch { /* as it is */ }
  return { view: view || "cluster", of: decoded, query: Object.fromEntries(new URLSearchParams(query)) }
}

/** The address of a view; `undefined` leaves a part of the query out. */
export function link(view: string, of: string | number = "", query: Record<string, string | number | undefined> = {}): string {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== "")
  const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString()
  return `#/${view}${of === "" ? "" : `/${encodeURIComponent(of)}`}${text ? `?${text}` : ""}`
}

/** Change parts of the query, in place: the way back leads to the view before. */
export function change(query: Record<string, string | number | undefined>) {
  const now = parse(location.hash)
  history.replaceState(null, "", link(now.view, now.of, { ...now.query, ...query }))
  dispatchEvent(new HashChangeEvent("hashchange"))
}

export function useRoute(): Route {
  const [route, set] = useState(() => parse(location.hash))
  useEffect(() => {
    const changed = () => { set(parse(location.hash)) }
    addEventListener("hashchange", changed)
    return () => { removeEventListener("hashchange", changed) }
  }, [])
  return route
}
