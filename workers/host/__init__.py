"""What we ask of the machine: Linux processes, waits for a core, object storage.

Each file stands alone. Imports `events` alone.
"""
