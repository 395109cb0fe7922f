"""control_plane/state."""
