"""The log: one ordered stream of records with one writer, in memory or in Redis streams.

Read `port` first: it defines the interface of every log. `memory` and
`redis_streams` implement it and pass one suite of tests. `embedded_server` starts a private server;
`archive` reads and writes exported files. Imports `records` and `spec`.
"""
