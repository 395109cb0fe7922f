"""Access to the host: Linux processes, waits for a core, object storage.

Each file stands alone. Imports `events` alone.
"""
