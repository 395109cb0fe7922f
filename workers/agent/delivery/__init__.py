"""workers/agent/delivery."""
