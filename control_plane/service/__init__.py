"""The running control plane: takes reports, advances the state machine, appends to the log."""
