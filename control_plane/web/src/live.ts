/** The record stream, and answers that follow it. */
import { useEffect, useReducer, useRef, useState } from "preact/hooks"
import { address, follow, get, Problem, session, type Answer, type Params, type Schemas } from "./api"

export type Connection = "connecting" | "live" | "lost"
type Record = Schemas["LogRecord"]

const TICK_MS_MIN = 1000
const RETRY_MS_MIN = 500
const RETRY_MS_MAX = 5000

/** Follows the log from one record on; after a break it goes on behind the last record. */
class Live {
  seq = 0
  connection: Connection = "connecting"
  lostSince_ms = 0
  /** The newest records, at most RECENT_NUM. */
  recent: Record[] = []
  private listeners = new Set<() => void>()
  private stop: AbortController | null = null

  listen(call: () => void): () => void {
    this.listeners.add(call)
    return () => this.listeners.delete(call)
  }

  async run(seq: number) {
    this.end()
    const stop = this.stop = new AbortController()
    this.seq = seq
    for (let wait_ms = RETRY_MS_MIN; !stop.signal.aborted && session.get();) {
      try {
        this.tell("live")
        await follow(this.seq, records => {
          wait_ms = RETRY_MS_MIN
          this.seq = records.at(-1)?.seq ?? this.seq
          this.recent = [...this.recent, ...records].slice(-200)
          this.tell("live")
        }, stop.signal)
      } catch (error) {
        if (stop.signal.aborted || (error instanceof Problem && error.status === 401)) return
        this.tell("lost")
      }
      await new Promise(done => { setTimeout(done, wait_ms) })
      wait_ms = Math.min(2 * wait_ms, RETRY_MS_MAX)
    }
  }

  end() { this.stop?.abort() }

  private tell(connection: Connection) {
    if (connection === "lost" && this.connection !== "lost") this.lostSince_ms = Date.now()
    this.connection = connection
    for (const call of this.listeners) call()
  }
}

export const live = new Live()

/** Render again with each change of the stream. */
export function useLive(): Live {
  const [, again] = useReducer((n: number) => n + 1, 0)
  useEffect(() => live.listen(() => { again(0) }), [])
  return live
}

export interface Loaded<A> { data: A | undefined; problem: Problem | undefined; busy: boolean; again: () => void }

/**
 * The answer of a GET. Without `at` in the parameters it is asked again as the log grows, at most each
 * second, and at most a tenth of the time. The last answer stays until the next one is there.
 */
export function useGet<P extends Parameters<typeof get>[0]>(path: P, params: Params = {}, skip = false): Loaded<Answer<P>> {
  const key = skip ? "" : address(path, params)
  const [found, set] = useState<{ key: string; data?: Answer<P>; problem?: Problem }>({ key: "" })
  const [turn, again] = useReducer((n: number) => n + 1, 0)
  const follows = !params.at
  const next = useRef({ at_ms: 0, seq: 0 })
  useEffect(() => {
    if (!key) return
    const stop = new AbortController()
    const began_ms = performance.now()
    next.current.seq = live.seq
    get(path, params, stop.signal).then(
      data => { set({ key, data }) },
      (problem: unknown) => {
        if (!stop.signal.aborted && problem instanceof Problem) set(before => ({ ...before, key, problem }))
      },
    ).finally(() => {
      const now_ms = performance.now()
      next.current.at_ms = now_ms + Math.max(TICK_MS_MIN, 10 * (now_ms - began_ms))
    })
    return () => { stop.abort() }
  }, [key, turn])
  useEffect(() => {
    if (!key || !follows) return
    let timer = 0
    const due = () => {
      if (timer || next.current.seq === live.seq) return
      timer = window.setTimeout(() => { timer = 0; again(0) }, Math.max(next.current.at_ms - performance.now(), 50))
    }
    const end = live.listen(due)
    return () => { end(); clearTimeout(timer) }
  }, [key, follows])
  return { data: found.data, problem: found.problem, busy: found.key !== key, again: () => { again(0) } }
}
