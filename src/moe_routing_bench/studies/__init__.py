"""Longer studies with the harness: profiles, drift of balance, power of the verdict, compiled kernels."""
