"""The command line: `unicron` and its commands."""
