"""cli/cluster."""
