"""cli/terminal."""
