"""State that leaves and enters."""
