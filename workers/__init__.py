"""Acts and watches: the agent of each node, and what runs inside a training rank.

`agent` and `training` never import each other: they meet in `ipc`, `diagnosis`, `host` and
`checkpoint_store`.
"""
