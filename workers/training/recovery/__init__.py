"""State for a new generation: who has it, who sends it, which micro-batches are left.

Read `settlement` (the ledger), `state_sources`, `resharding` (pure), then `state_exchange`. Imports
`model`.
"""
