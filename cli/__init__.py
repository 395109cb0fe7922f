"""The command line: `unicron` and its commands.

Read `main` (process start), `app` (the table of commands), then `commands`. Imports everything.
"""
