"""One step, in reading order: runner, reducer and bucket, agreement, hyperparams, gather_hooks."""
