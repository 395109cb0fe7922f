"""What users write: the job spec and the policy, checked and normalised.

Read `job`, then `model` and `parallelism`. `policy` has every limit and prior of the control plane;
`support` says what recovers in memory; `validation` turns errors into one line. Imports `errors`.
"""
