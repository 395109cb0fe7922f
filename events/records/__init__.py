"""The records of the log: their envelope, their bodies and their encoding.

Read `envelope`, then `reports` (what happened), `decisions` (what follows), `orders` (what agents
must do). `types` has the shared types; `codec` turns records into bytes and back. Imports `spec`.
"""
