"""Processes of ranks: started, watched, ended, and why they ended.

Read `launcher`, `process`, `zygote`, then `exit_cause` and `exit_report`. Imports `ipc`,
`diagnosis` and `host`.
"""
