"""A recorded log, simulated again with other choices.

Read `counterfactual`, then the modules that read the log: `recorded_faults`, `recorded_costs`,
`recorded_earnings`. Pure. Imports `simulation`.
"""
