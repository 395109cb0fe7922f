"""A cluster on this machine or elsewhere: its folder, its processes, its HTTP client.

Read `state_dir`, `client`, `local_cluster`. Imports nothing of the CLI.
"""
