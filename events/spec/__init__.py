"""What users write: the job spec and the policy, validated and normalised.

Read `job`, then `model` and `parallelism`. `policy` has every limit and prior of the control plane;
`support` lists what recovers in memory; `validation` formats errors. Imports `errors`.
"""
