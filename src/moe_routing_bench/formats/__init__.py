"""Formats for expert weights of 8 and 4 bits: one file a format, `named.py` for all of them."""
