"""cli/files."""
