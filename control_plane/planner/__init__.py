"""control_plane/planner."""
