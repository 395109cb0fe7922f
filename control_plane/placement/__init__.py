"""From counts to slots: which ranks run on which nodes.

Read `placement`, then `topology_spread` (state on more than one node). Pure. Imports `throughput`
and `state`.
"""
