"""workers/agent/processes."""
