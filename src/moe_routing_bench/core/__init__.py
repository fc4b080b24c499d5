"""Values and helpers that every other room uses; torch alone."""
