"""Raises while its file is loaded."""

raise RuntimeError("the red team raises while it is loaded")
