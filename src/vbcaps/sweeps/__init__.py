"""Sweeps: many trainings of one recipe with different fields, by any number of processes on one or several machines.

``space`` says which fields vary and how, ``claims`` keeps two workers from one trial, ``study`` hands out trials and
keeps their results, ``worker`` trains them. `vbcaps sweep` is the same on the command line.
"""
