"""The layer MoE and modules built on it."""
