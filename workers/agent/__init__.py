"""The agent: one process per node; orders in, reports out; supervises ranks. No torch.

Read `main`, `agent` (its loops), `order_executor` (what an order does). Imports `health`,
`monitoring`, `processes`, `delivery`.
"""
