"""Text for terminals: options, streams, formats, one line for each record."""
