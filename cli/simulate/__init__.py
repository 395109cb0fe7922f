"""`unicron simulate`: policies compared on scenarios and recorded logs.

Read `compare`, then `from_log`, `capacity` and the report of the paper. Imports `files` and
`terminal`.
"""
