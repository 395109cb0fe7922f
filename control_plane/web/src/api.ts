/** Calls of the control plane's HTTP API, with the types of its OpenAPI document. */
import type { components, paths } from "./api-types"

export type Schemas = components["schemas"]
type GetPath = { [P in keyof paths]: paths[P] extends { get: object } ? P : never }[keyof paths]
export type Answer<P extends keyof paths> = paths[P] extends {
  get: { responses: { 200: { content: { "application/json": infer A } } } }
} ? A : never
export type Params = Record<string, string | number | undefined>

/** A refusal (RFC 9457), or a connection that broke (status 0). */
export class Problem extends Error {
  constructor(readonly status: number, detail: string, readonly hint = "") { super(detail) }
}

export interface Session { secret: string; name: string; role: string; expires_s: number }

const KEY = "unicron-session"
/** How often a read is asked again while others of the token are in progress. */
const TRIES = 30

/** The session of this tab. sessionStorage belongs to the origin, port included. */
export const session = {
  get: (): Session | null => {
    const found = JSON.parse(sessionStorage.getItem(KEY) ?? "null") as Session | null
    return found && found.expires_s * 1000 > Date.now() ? found : null
  },
  set: (made: Session) => { sessionStorage.setItem(KEY, JSON.stringify(made)) },
  drop: () => { sessionStorage.removeItem(KEY) },
}

/** Called when the session has ended, with why. */
let ended: (why: string) => void = () => undefined
export const onEnd = (call: typeof ended) => { ended = call }

async function send(path: string, init: RequestInit, tries = TRIES): Promise<Response> {
  const mine = path === "/v1/sessions" ? null : session.get() // a code is for who has no session, or another one
  const headers = new Headers(init.headers)
  if (mine) headers.set("Authorization", `Bearer ${mine.secret}`)
  let reply: Response
  try {
    reply = await fetch(path, { ...init, headers, redirect: "manual" })
  } catch (error) {
    if (init.signal?.aborted) throw error
    throw new Problem(0, "the control plane cannot be reached")
  }
  if (reply.ok) return reply
  if (reply.status === 429 && tries > 0) { // others of this token read; the answer says when to ask again
    await new Promise(done => setTimeout(done, 1000 * Number(reply.headers.get("Retry-After") ?? 1)))
    return send(path, init, tries - 1)
  }
  if (reply.type === "opaqueredirect") {
    throw new Problem(307, "this control plane follows another one, which alone writes",
      "unicron open, which finds the one that leads")
  }
  const told = await reply.json().catch(() => ({})) as Partial<Schemas["Problem"]>
  const problem = new Problem(reply.status, told.detail ?? reply.statusText, told.hint)
  if (reply.status === 401 && mine) {
    session.drop()
    const leader = reply.headers.get("Unicron-Follows")
    ended(leader ? `This control plane now follows ${leader}.` : "The session has ended.")
  }
  throw problem
}

/** The address of a call: parameters that the path names go there, the others into the query. */
export function address(path: string, params: Params = {}): string {
  const query = new URLSearchParams()
  let filled = path
  for (const [name, value] of Object.entries(params)) {
    if (value === undefined || value === "") continue
    if (filled.includes(`{${name}}`)) filled = filled.replace(`{${name}}`, encodeURIComponent(value))
    else query.set(name, String(value))
  }
  return query.size ? `${filled}?${query}` : filled
}

export async function get<P extends GetPath>(path: P, params?: Params, signal?: AbortSignal): Promise<Answer<P>> {
  const reply = await send(address(path, params), signal ? { signal } : {})
  return await reply.json() as Answer<P>
}

export async function post<A>(path: string, body: object, headers: Record<string, string> = {}): Promise<{ answer: A; etag: string }> {
  const reply = await send(path, {
    method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...headers },
  })
  return { answer: await reply.json() as A, etag: reply.headers.get("ETag") ?? "" }
}

/** The records of the log, all of them or those that the parameters choose. */
export async function lines(params: Params, signal: AbortSignal): Promise<Schemas["LogRecord"][]> {
  const reply = await send(address("/v1/log", params), { signal })
  return (await reply.text()).split("\n").filter(Boolean).map(line => JSON.parse(line) as Schemas["LogRecord"])
}

/** Give the records after `after` to `take`, as they come, until the connection breaks. */
export async function follow(after: number, take: (records: Schemas["LogRecord"][]) => void,
  signal: AbortSignal): Promise<never> {
  const reply = await send(address("/v1/log", { after }), { headers: { Accept: "text/event-stream" }, signal })
  const reader = reply.body!.pipeThrough(new TextDecoderStream()).getReader()
  for (let text = ""; ;) {
    const { value, done } = await reader.read()
    if (done) throw new Problem(0, "the connection was closed")
    const events = (text + value).split("\n\n")
    text = events.pop()!
    const records: Schemas["LogRecord"][] = []
    for (const event of events) {
      const data = event.split("\n").find(line => line.startsWith("data: "))?.slice(6)
      if (!data) continue
      if (event.includes("event: problem")) {
        const told = JSON.parse(data) as Schemas["Problem"]
        if (told.status === 401) {
          session.drop()
          ended("The session has ended.")
        }
        throw new Problem(told.status, told.detail, told.hint)
      }
      records.push(JSON.parse(data) as Schemas["LogRecord"])
    }
    take(records)
  }
}

/** The records of the log that a query asks for. */
export async function records(query: Params, signal?: AbortSignal): Promise<Schemas["LogRecord"][]> {
  const reply = await send(address("/v1/log", query), signal ? { signal } : {})
  const lines = (await reply.text()).split("\n").filter(line => line !== "")
  return lines.map(line => JSON.parse(line) as Schemas["LogRecord"])
}
