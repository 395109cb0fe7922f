"""Reports on their way to the log: joined, spooled, sent at least once.

Read `join`, `spool`, `outbox`, `log_link`. Imports `events` alone.
"""
