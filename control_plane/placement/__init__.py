"""From counts to slots: which ranks run on which nodes.

Read `placement`, then `topology_spread` (no state on one node alone). Pure. Imports `throughput`
and
`state`.
"""
