"""control_plane/simulation/counterfactual."""
