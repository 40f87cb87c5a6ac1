"""Text to batches, training steps, and the loop of `nntile train`."""
