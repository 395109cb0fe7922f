"""Files that users write: jobs, policies, plans.

One file each. Imports `events`.
"""
