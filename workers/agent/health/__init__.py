"""Reads how the node is: GPUs, kernel messages, network, disk, memory, a site's own checks."""
