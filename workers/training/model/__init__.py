"""The training job in memory: model, optimizer, data, random numbers and the whole state.

Read `workload`, `trainee`, `training_state`. Imports `communicators` and `process`.
"""
