"""cli/simulate."""
