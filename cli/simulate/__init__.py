"""`unicron simulate`: policies compared on scenarios, on the paper's traces, on recorded logs.

Read `compare`, then `from_log`, `capacity` and the report of the paper. Imports `files` and
`terminal`.
"""
