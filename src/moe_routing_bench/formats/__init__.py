"""Formats for expert weights with 8 and 4 bits: one file per format; `named.py` finds them by name."""
