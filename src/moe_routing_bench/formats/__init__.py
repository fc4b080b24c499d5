"""Formats that expert weights are stored in with 8 and 4 bits: one file a format, `named.py` for all of them."""
