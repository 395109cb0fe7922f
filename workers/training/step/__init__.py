"""One iteration: micro-batches, gradient reduction, optimizer step, each restartable.

Read `iteration`, `forward_backward`, `gradient_reduction`, `optimizer_step`. Imports `recovery`,
`model`, `communicators` and `process`.
"""
