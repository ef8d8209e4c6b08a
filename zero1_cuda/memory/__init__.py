"""The memory arithmetic, and what is really held."""
