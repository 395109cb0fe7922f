"""events/log."""
