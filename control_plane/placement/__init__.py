"""control_plane/placement."""
