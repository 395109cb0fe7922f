"""What each command does; `app` has their options.

One file a command, or a group of them. Imports `simulate`, `screens`, `files`, `terminal` and
`cluster`.
"""
