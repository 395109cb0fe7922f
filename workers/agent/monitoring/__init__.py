"""workers/agent/monitoring."""
