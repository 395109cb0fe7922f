"""Decides: the cluster state is a fold of the log, orders are a function of it."""
