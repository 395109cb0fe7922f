"""events/spec."""
