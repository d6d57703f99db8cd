"""Trained networks: those that are in the package or fetched by name, and weights files."""
