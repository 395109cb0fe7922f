"""workers/training/model."""
