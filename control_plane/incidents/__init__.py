"""From faults to incidents: severity, root cause, escalation, closing.

Read `severity` (the table), `root_cause`, `lifecycle`. The others are the rules of one kind of
incident each. Pure. Imports `state`.
"""
