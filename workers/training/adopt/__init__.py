"""workers/training/adopt."""
