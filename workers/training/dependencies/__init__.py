"""Private parts of torch and megatron-core: one file for each, and the check of their versions.

A new version of a dependency is tried by the check, then by the tests, and adapted in its file.
"""
