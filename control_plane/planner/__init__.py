"""The plan: how many slots each task gets, so that the weighted FLOP/s are greatest.

Read `problem` (what is asked), `objective` (the equation of the paper), `constraints`, `planner`
(the solution), `explain` (the record). Pure. Imports `solver`, `throughput`, `incidents` and
`state`.
"""
