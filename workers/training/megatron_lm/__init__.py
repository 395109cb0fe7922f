"""Megatron-LM's pretraining scripts with in-memory recovery: `unicron megatron SCRIPT`.

Read `launcher`, `pretrain`, `arguments`. Imports `workers/training/adopt` and the layers below it.
"""
