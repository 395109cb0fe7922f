"""The fold: how each record changes the cluster state.

Read `fold` (the table of handlers), then the handlers by subject. `edits` has the changes that
several handlers make. Pure. Imports `incidents`, `throughput` and `state`; never the planner.
"""
