"""The log: one ordered stream of records with one writer, in Redis streams.

Read `port` first: it defines the interface of every log. `redis_streams` implements it, and so does
the tests' log in memory (tests/drivers/memory_log.py); both pass one suite of tests.
`embedded_server` starts a private server; `archive` reads and writes exported files. Imports
`records` and `spec`.
"""
