"""Checkpoints on disk, at URLs, and in the memory of checkpoint stores.

Read `checkpoint`, `saver`, `memory_checkpoint`. Imports `step`, `model` and `process`.
"""
