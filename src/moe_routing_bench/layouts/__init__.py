"""Layouts as functions: shape:stride, CuTe's algebra, and checks of tiles and copies with it."""
