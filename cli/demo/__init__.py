"""`unicron demo`: a real cluster is broken on purpose, recovers, and is compared with a reference
run.

Read `demo`, `acts`, then `stage`, `proof` and `twins`. Imports `commands` and what is below it.
"""
