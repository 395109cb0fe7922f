"""The records of the log: their envelope, their bodies and their encoding.

Read `envelope`, then `reports` (what happened), `decisions` (what was concluded), `orders` (what is
to be done). `types` has what bodies share; `codec` turns records into bytes and back. Imports
`spec`.
"""
