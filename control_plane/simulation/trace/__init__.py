"""External events of a simulated cluster: drawn from a seed, or read from a file.

Read `external_event`, then `generator` and `trace_file`. Pure. Imports `policies`.
"""
