"""The cluster state: plain data, changed by the fold alone."""
