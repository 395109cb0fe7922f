"""Generations of communicators: built and destroyed in one living process.

Read `communicators`, then `process_groups` and `sockets`. Imports nothing of training.
"""
