"""Files that users write: jobs, policies, plans."""
