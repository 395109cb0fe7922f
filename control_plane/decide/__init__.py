"""control_plane/decide."""
