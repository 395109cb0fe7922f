"""control_plane/simulation/trace."""
