"""The cluster state: plain data, changed by the fold alone.

Read `cluster`, then `task`, `incident` and `node`. `members` has queries on a task's ranks. Pure.
Imports only `events`.
"""
