"""control_plane/planner/solver."""
