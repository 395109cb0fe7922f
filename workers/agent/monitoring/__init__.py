"""Watches the ranks of a node: progress, step times, printed output, hangs."""
