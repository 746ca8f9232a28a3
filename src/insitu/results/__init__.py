"""A run directory, open for reading."""
