"""One reading of the log: incidents with their phases, transitions, and losses of nodes."""
