"""The agent: one process per node; orders in, reports out; supervises ranks. No torch."""
