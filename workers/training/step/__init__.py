"""workers/training/step."""
