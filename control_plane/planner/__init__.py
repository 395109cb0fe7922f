"""The planner: slots per task that maximise the weighted achieved FLOP/s (WAF) of the cluster.

Read `problem` (the input), `objective` (the paper's equation), `constraints`, `planner` (the
solution), `explain` (the record). Pure. Imports `solver`, `throughput`, `incidents` and `state`.
"""
