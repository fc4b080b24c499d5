"""The layer and what is built around it."""
