"""workers/diagnosis/rules."""
