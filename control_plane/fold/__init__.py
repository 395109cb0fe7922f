"""The fold: how each record changes the cluster state. `fold` has the table of handlers."""
