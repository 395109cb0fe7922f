"""Diagnosis of error text, step times and flight-recorder dumps.

Read `classifier`, `step_time`, then `flight_recorder`. All is pure
but `dump_files`, which reads dumps from disk. Imports `rules`.
"""
