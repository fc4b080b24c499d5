"""Hosts: where implementations run while they are timed (host.py)."""
