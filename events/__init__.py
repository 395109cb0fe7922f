"""Facts and orders: what happened, in order. Imports nothing else of ours.

Read `spec`, then `records`, then `log`. `control_plane` and `workers` share this package alone.
"""
