"""The HTTP interface: requests of operators, the state as plain data, dry runs.

Read `http`, then `requests`. Imports everything of the control plane but the simulation.
"""
