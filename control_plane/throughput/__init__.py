"""control_plane/throughput."""
