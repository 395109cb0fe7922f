"""The simulator: the real fold and decide under a virtual clock, over a simulated cluster.

Read `scenario`, `run`, `engine`, `cluster`, then `accounting`. Pure. Imports `trace`, `policies`,
`decide` and what is below it.
"""
