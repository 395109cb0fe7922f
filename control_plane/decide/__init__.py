"""Decisions: the decisions and orders that follow from a record, as data."""
