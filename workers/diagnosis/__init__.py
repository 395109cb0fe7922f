"""Diagnosis of error text, step times and flight-recorder dumps. Pure.

Read `classifier`, `step_time`, then `flight_recorder`, `wait_graph` and `hang_locator`. Imports
`rules`.
"""
