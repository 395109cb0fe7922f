"""Access to the host: Linux processes, waits for a core, memory cgroups, detached threads."""
