"""The log: one ordered stream of records with one writer, in Redis streams."""
