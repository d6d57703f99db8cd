"""The kernels for CPUs."""
