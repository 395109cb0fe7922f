"""The store of in-memory checkpoints: one process per node, started by its agent. No torch.

Read `protocol`, then `server` and `store`. Imports `host`.
"""
