"""Where things lie: layout, buffers, state, registry."""
