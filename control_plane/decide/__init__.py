"""What follows from a record: decisions and orders, as data.

Read `advance` (the one entry), `decide` (which tasks a record affects), `transition` (the table of
a task's transition). `replay` makes recorded decisions again and compares them. Pure. Imports
`fold`,
`planner`, `placement`, `incidents`, `throughput`, `state`.
"""
