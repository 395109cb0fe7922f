"""Decisions: the decisions and orders that follow from a record, as data.

Read `advance` (the one entry), `decide` (which tasks a record affects), `transition` (the table of
a task's transition). `replay` recomputes recorded decisions and compares them. Pure. Imports
`fold`, `planner`, `placement`, `incidents`, `throughput` and `state`.
"""
