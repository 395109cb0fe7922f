"""The trained model in plain torch: read from a checkpoint, run, exported. Needs no Megatron."""
