"""cli/screens."""
