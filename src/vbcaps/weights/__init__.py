"""Trained networks: those that come with the package, and weights files."""
