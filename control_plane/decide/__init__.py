"""Decisions: the decisions and orders that follow from a record, as data. `advance` is the
entry."""
