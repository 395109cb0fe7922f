"""workers/diagnosis."""
