"""One reading of the log: incidents with their phases, transitions, losses and WAF over time.

Read `history` (it drives the fold and adds times and curves), `transitions`,
`injected`, `waf`, then `incident_records`. Pure. Imports `fold` and `state`.
"""
