"""Joins the control plane, and delivers reports to the log: spooled, sent at least once."""
