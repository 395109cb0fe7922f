"""Access to the host: Linux processes, waits for a core and memory cgroups."""
