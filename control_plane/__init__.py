"""Decides: folds the log into the cluster state, plans, and commands transitions.

Read `state`, `fold`, `decide`, then `planner`. `server` is the process. Imports `events` alone.
"""
