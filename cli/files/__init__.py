"""Files that users write: jobs, policies, plans.

One module each. Imports `events`.
"""
