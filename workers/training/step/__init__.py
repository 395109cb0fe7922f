"""One iteration: micro-batches, gradient reduction, optimizer step, each restartable.

Read README.md, then `iteration`, `own_part`, `progress`, `sums`. Imports `recovery`, `model`,
`communicators` and `process`.
"""
