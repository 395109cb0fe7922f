"""Keeps copies of ranks' state in memory: one process per node, started by its agent. No torch."""
