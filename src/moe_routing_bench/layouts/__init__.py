"""Layouts as functions: shape:stride, the algebra of CuTe, and what it proves about tiles and copies."""
