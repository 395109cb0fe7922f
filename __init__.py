"""Unicron: the open self-healing control plane for large-model training."""

__version__ = "0.3.0"
