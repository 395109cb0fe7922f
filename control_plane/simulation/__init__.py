"""The simulator: the heart under a virtual clock, over a cluster on paper."""
