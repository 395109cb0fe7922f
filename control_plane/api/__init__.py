"""The HTTP interface: operators' requests, the state as plain data, dry runs.

Read `http`, then `requests`. Imports everything of the control plane but the simulation.
"""
