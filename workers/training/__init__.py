"""Inside the rank: communicator generations, iterations, state. The only package with torch.

Read `rank` (the process), `member` (one member of a generation), `state_recovery`. `adopt` and
`megatron_lm` are what users' scripts import.
"""
