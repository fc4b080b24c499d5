"""Values and helpers that every other folder uses. They need only torch."""
