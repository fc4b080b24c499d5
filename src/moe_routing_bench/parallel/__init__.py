"""Experts of one layer on many ranks: placement, exchange, the parallel layer."""
