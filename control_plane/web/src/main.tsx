/** The frame: login, menu, the moment that is shown, the connection; the view is in the middle. */
import { render } from "preact"
import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks"
import { get, onEnd, post, Problem, session, type Schemas, type Session } from "./api"
import { count, isUtc, setUtc, span, time, zone } from "./format"
import { live, useGet, useLive } from "./live"
import { change, link, useRoute } from "./route"
import "./style.css"
import { Trouble } from "./ui"
import { VIEWS } from "./views"

const CLOCK_MS = 10_000
/** Of the tasks that have ended, as many are in each state; the others are found by a filter. */
const ENDED_NUM = 50

const hasCode = () => location.hash.startsWith("#code=")

/** The code in the address becomes a session; it is removed from the address before anything else. */
async function enter(text: string): Promise<void> {
  const code = text.trim().replace(/^.*#code=/, "")
  session.set((await post<Session>("/v1/sessions", { code })).answer)
}

function App() {
  const [mine, setMine] = useState(() => hasCode() ? null : session.get())
  const [why, setWhy] = useState("")
  useEffect(() => {
    onEnd(text => { live.end(); setWhy(text); setMine(null) })
    if (!hasCode()) return
    const code = location.hash
    history.replaceState(null, "", "#/")
    dispatchEvent(new HashChangeEvent("hashchange"))
    // With a code that works no more, a session that still holds goes on.
    enter(code).catch((error: unknown) => { setWhy(String((error as Error).message)) }).finally(() => { setMine(session.get()) })
  }, [])
  if (!mine) return <Login why={why} onEnter={() => { setWhy(""); setMine(session.get()) }} />
  return <Frame mine={mine} onLeave={() => {
    void post("/v1/sessions/end", {}).catch(() => undefined).finally(() => { session.drop(); live.end(); setMine(null) })
  }} />
}

function Login({ why, onEnter }: { why: string; onEnter: () => void }) {
  const [text, setText] = useState("")
  const [problem, setProblem] = useState<Problem>()
  const [leader, setLeader] = useState("")
  const [file, setFile] = useState<string>()  // undefined until the server has said which one it is
  useEffect(() => {
    fetch("/v1/health").then(async reply => {
      setLeader(reply.headers.get("Unicron-Follows") ?? "")
      setFile((await reply.json() as Schemas["Health"]).file ?? "")
    }).catch(() => { setFile("") })
  }, [])
  return <main class="login">
    <h1>Unicron</h1>
    {why && <p class="trouble" role="alert">{why}</p>}
    {leader && <p class="banner">This control plane follows <a href={leader}>{leader}</a>, which leads.</p>}
    {file ? <p>This is the log {file}: open the address that <code>unicron view</code> has printed.</p>
      : file === "" && <p>Run <code>unicron open</code> in a terminal. It opens this page with a code that works once.</p>}
    <form onSubmit={event => {
      event.preventDefault()
      enter(text).then(onEnter, (error: unknown) => { setProblem(error as Problem) })
    }}>
      <label>Or paste the address that it printed <input value={text} autofocus autocomplete="off" spellcheck={false}
        onInput={event => { setText(event.currentTarget.value) }} /></label>
      <button type="submit">Enter</button>
    </form>
    <Trouble problem={problem} />
  </main>
}

function Frame({ mine, onLeave }: { mine: Session; onLeave: () => void }) {
  const route = useRoute()
  const at = route.query.at ?? ""
  const [health, setHealth] = useState<Schemas["Health"]>()
  const { data: state, problem, busy } = useGet("/v1/state", { at, ended: ENDED_NUM })
  const [tick, again] = useReducer((n: number) => n + 1, 0)
  useEffect(() => {
    get("/v1/health").then(found => { setHealth(found); void live.run(found.seq ?? 0) }, () => { void live.run(0) })
    const clock = setInterval(() => { again(0) }, CLOCK_MS)
    return () => { live.end(); clearInterval(clock) }
  }, [])
  const entry = VIEWS[route.view]
  const name = health?.cluster ?? ""
  // After a link, focus is at the new view's heading: a reader reads it, and Tab goes on from there.
  const shown = useRef("")
  useEffect(() => {
    scrollTo(0, 0)
    if (shown.current) document.querySelector<HTMLElement>("h1")?.focus({ preventScroll: true })
    shown.current = route.view
  }, [route.view, route.of])
  useEffect(() => { document.title = `${entry?.title ?? "Not found"}${route.of && ` ${route.of}`} · ${name} · Unicron` })
  // Drawn again with a new state, address or zone, not with each record.
  const view = useMemo(() => state && entry && <entry.component state={state} at={at} of={route.of} query={route.query}
    now_s={at || health?.file ? state.cluster.at_s : Date.now() / 1000} recorded={Boolean(health?.file)}
    mayAct={!at && !health?.file && mine.role !== "view"} />, [state, route, health, tick])
  return <>
    <a class="skip" href="#main" onClick={event => { event.preventDefault(); document.getElementById("main")?.focus() }}>Skip to the view</a>
    <header>
      <strong class="brand">Unicron</strong> <span class="cluster">{name}{health?.file && ` (${health.file})`}</span>
      <nav aria-label="Views">{Object.entries(VIEWS).filter(([, one]) => one.inMenu).map(([key, one]) =>
        <a href={link(key, "", { at })} aria-current={key === route.view ? "page" : undefined}>{one.title}</a>)}</nav>
      <span class="spring" />
      <button type="button" onClick={() => { setUtc(!isUtc()); again(0) }} aria-label={`Times in ${zone()}; change`}>{zone()}</button>
      <button type="button" onClick={onLeave} title={`${mine.name}, role ${mine.role}`}>Leave</button>
    </header>
    <Moment at={at} state={state} busy={busy} />
    <div role="status" aria-live="polite">
      <Lost />
      {health?.follows && <p class="banner">This control plane follows {health.follows}, which leads.
        It shows the same; requests go to the leader: <code>unicron open</code></p>}
    </div>
    <main id="main" tabIndex={-1} aria-busy={busy} class={busy && state ? "busy" : ""}>
      <h1 tabIndex={-1}>{entry?.title ?? "There is no such view"}{route.of && ` ${route.of}`}</h1>
      <Trouble problem={problem} />
      {!state && !problem && <p class="empty">reading…</p>}
      {view}
      {!entry && <p><a href={link("cluster")}>The cluster</a></p>}
    </main>
  </>
}

function Lost() {
  const { connection, lostSince_ms, seq } = useLive()
  return connection !== "lost" ? null : <p class="banner">The connection is lost since {time(lostSince_ms / 1000)}.
    What you see is from then. The page goes on from record {count(seq)} when the control plane answers.
    If another one leads now, <code>unicron open</code> finds it.</p>
}

/** The slider over the whole log. */
function Moment({ at, state, busy }: { at: string; state: Schemas["View"] | undefined; busy: boolean }) {
  const last = Math.max(useLive().seq, state?.cluster.seq ?? 0)
  const [pulled, setPulled] = useState<number>()
  const seq = pulled ?? (/^\d+$/.test(at) ? Math.min(Number(at), last) : state?.cluster.seq ?? last)
  const incidents = state?.incidents.map(one => one.id) ?? []
  const go = (to: number | undefined) => { change({ at: to === undefined ? undefined : Math.min(Math.max(to, 1), last) }) }
  useEffect(() => {
    if (pulled === undefined) return
    const timer = setTimeout(() => { go(pulled); setPulled(undefined) }, 150)
    return () => { clearTimeout(timer) }
  }, [pulled])
  const before = incidents.filter(one => one < seq).at(-1)
  return <form class={`moment ${at ? "past" : ""}`} aria-label="Moment shown" onSubmit={event => { event.preventDefault() }}>
    <button type="button" onClick={() => { go(undefined) }} aria-pressed={!at}>{at ? "To the present" : "Present"}</button>
    <button type="button" aria-label="Incident before" disabled={before === undefined} onClick={() => { go(before) }}>|◀</button>
    <button type="button" aria-label="Record before" onClick={() => { go(seq - 1) }}>◀</button>
    <input type="range" min={1} max={Math.max(last, 1)} value={seq} aria-label="History: record"
      aria-valuetext={`record ${seq}`} onInput={event => { setPulled(Number(event.currentTarget.value)) }} />
    <button type="button" aria-label="Record behind" disabled={!at} onClick={() => { go(seq + 1) }}>▶</button>
    <output>record {count(seq)}{state && pulled === undefined && !busy && <>, {time(state.cluster.at_s)}
      {at && <> <b>past, {span(Math.max(Date.now() / 1000 - state.cluster.at_s, 0))} ago</b></>}</>}</output>
  </form>
}

render(<App />, document.getElementById("app")!)
