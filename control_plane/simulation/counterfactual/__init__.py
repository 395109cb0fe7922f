"""A recorded log, played again under other choices.

Read `counterfactual`, then what is read from the log: `recorded_faults`, `recorded_costs`,
`recorded_earnings`. Pure. Imports `simulation`.
"""
