"""`unicron simulate`: policies compared on scenarios, the paper's traces, and recorded logs.

Read `compare`, then `from_log`, `capacity` and the report of the paper. Imports `files` and
`terminal`.
"""
