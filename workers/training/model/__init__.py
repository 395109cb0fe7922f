"""The training job in memory: model, optimizer, data, random numbers, and its whole state.

Read `workload`, `trainee`, `training_state`. Imports `communicators` and `process`.
"""
