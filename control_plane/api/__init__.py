"""The HTTP interface: operators' requests, the state as plain data, dry runs."""
