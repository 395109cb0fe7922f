"""workers/training/checkpoint."""
