"""Reading and checking of a run's YAML, and documentation of its keys."""
