"""The face: thin commands over the rest."""
