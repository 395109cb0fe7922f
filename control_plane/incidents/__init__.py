"""control_plane/incidents."""
