"""workers/training/communicators."""
