"""Starts, monitors and ends the processes of ranks, and finds out why they ended.

Read `launcher`, `process`, `zygote`, then `exit_cause` and `exit_report`. Imports `ipc`,
`diagnosis` and `host`.
"""
