"""Drafting methods, their training and their ensembles, behind the interface in `interface.py`."""
