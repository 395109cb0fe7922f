"""workers/training/recovery."""
