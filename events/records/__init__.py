"""The records of the log: their envelope, their bodies and their encoding."""
