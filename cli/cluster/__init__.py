"""A cluster on this machine or elsewhere: its state folder, processes and HTTP client.

Read `state_dir`, `client`, `local_cluster`. Imports nothing of the CLI.
"""
