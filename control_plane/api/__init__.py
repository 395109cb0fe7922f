"""control_plane/api."""
