"""Trained networks: the ones in the package, and weights files."""
