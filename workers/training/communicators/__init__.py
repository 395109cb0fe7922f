"""Generations of communicators, built and destroyed within one process.

Read `communicators`, then `process_groups` and `sockets`. Imports only `dependencies` of training.
"""
