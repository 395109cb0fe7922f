"""workers/host."""
