"""State recovery for a new generation: its holders, its transfer, the remaining micro-batches.

Read `settlement`, `state_sources`, `resharding` (pure), then `state_exchange`, which uses `peers`
and `state_transfer`. Imports `model`.
"""
