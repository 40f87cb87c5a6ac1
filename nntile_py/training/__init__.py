"""Training: the Trainer with its steps, the datasets of a config, and the loop of `nntile train`."""
