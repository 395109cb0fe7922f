"""Records, log and job spec: reports, decisions and orders. Imports no other Unicron package.

Read `spec`, then `records`, then `log`. `control_plane` and `workers` share only this package.
"""
