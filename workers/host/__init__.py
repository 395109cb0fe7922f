"""Access to the host: Linux processes, waits for a core, detached threads, object storage.

Each file stands alone. Imports `events` alone.
"""
