"""The fold: how each record changes the cluster state.

Read `fold` (dispatch by kind), then the handlers by subject. `edits` has the changes that several
handlers make. Pure. Imports `incidents`, `throughput` and `state`; never the planner.
"""
