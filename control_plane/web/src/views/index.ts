/** The views: one row each. A view's file knows nothing of the others. */
import type { ComponentType } from "preact"
import type { Schemas } from "../api"
import { Audit } from "./audit"
import { Cluster } from "./cluster"
import { Incident } from "./incident"
import { Costs } from "./costs"
import { Nodes } from "./nodes"
import { PlanPage } from "./plan"
import { TaskPage } from "./task"

export interface ViewProps {
  /** The state at the moment that is shown. */
  state: Schemas["View"]
  /** That moment as in the address: a seq, a time, or "": the present. */
  at: string
  /** The last part of the path: a task, an incident. */
  of: string
  query: Record<string, string>
  /** The time that is shown: of the moment, or now. */
  now_s: number
  /** Whether this is a log that has ended (`unicron view`). */
  recorded: boolean
  /** Whether the session may act: it is live, and the role allows it. */
  mayAct: boolean
}

export interface ViewEntry { title: string; component: ComponentType<ViewProps>; inMenu: boolean }

export const VIEWS: Record<string, ViewEntry> = {
  cluster: { title: "Cluster", component: Cluster, inMenu: true },
  incident: { title: "Incident", component: Incident, inMenu: true },
  task: { title: "Task", component: TaskPage, inMenu: true },
  nodes: { title: "Nodes", component: Nodes, inMenu: true },
  plan: { title: "Plan", component: PlanPage, inMenu: true },
  costs: { title: "Costs", component: Costs, inMenu: true },
  audit: { title: "Audit", component: Audit, inMenu: true },
}
