"""Facts and orders: what happened, in order. Imports nothing else of ours."""
