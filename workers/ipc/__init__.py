"""workers/ipc."""
