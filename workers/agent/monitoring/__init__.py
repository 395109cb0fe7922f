"""Watches the ranks of a node: progress, step times, printed output, hangs.

Read `rank_monitor` (training ranks) and `output_monitor` (commands). Imports `processes`, `ipc` and
`diagnosis`.
"""
