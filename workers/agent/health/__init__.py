"""Monitors the node's health: GPUs, kernel log, network, disk, memory, a site's own checks."""
