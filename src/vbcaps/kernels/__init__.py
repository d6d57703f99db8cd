"""The fast twins of the routings, for GPUs (Triton) and CPUs (C++)."""
