"""One reading of the log: incidents with their phases, transitions and losses.

Read `history` (it drives the fold and adds times and curves), `transitions`,
`injected`, then `incident_records`. Pure. Imports `fold` and `state`.
"""
