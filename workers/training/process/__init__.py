"""workers/training/process."""
