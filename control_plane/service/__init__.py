"""The running control plane: takes reports, advances the state machine, appends to the log.

Read `coordinator`, then `leader` (one writer at a time) and `leases` (node liveness). Imports
`decide` and what is below it.
"""
