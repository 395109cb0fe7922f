"""The rank as a process: its control thread, its trace, its exit report.

Read `control_thread`, then `exit_report`. Imports `ipc`, `diagnosis` and `dependencies`.
"""
