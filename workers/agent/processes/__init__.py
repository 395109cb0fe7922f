"""Starts, monitors and ends the processes of ranks, and finds out why they ended."""
