"""control_plane/service."""
