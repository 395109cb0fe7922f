"""events/records."""
