"""Inside the rank: communicator generations, iterations, state. The only package with torch.

Read `rank` (the process), `member` (one member of a generation), `state_recovery`. Users' scripts
import `adopt`; `megatron_lm` runs those of Megatron-LM.
"""
