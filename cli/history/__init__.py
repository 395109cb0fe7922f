"""What a log says of tasks and incidents over time.

Read `history`, then `incident_records`, `transitions`, `downtime` and `waf`. Imports `terminal`.
"""
