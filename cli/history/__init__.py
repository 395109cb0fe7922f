"""cli/history."""
