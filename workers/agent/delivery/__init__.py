"""Joins the control plane, and delivers reports to the log: spooled, sent at least once.

Read `join`, `spool`, `outbox`, `log_link`. Imports `events` alone.
"""
