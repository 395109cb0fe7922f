"""control_plane/fold."""
