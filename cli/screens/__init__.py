"""Screens: plain data as text of at most 100 columns."""
