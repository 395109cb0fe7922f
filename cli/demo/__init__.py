"""cli/demo."""
