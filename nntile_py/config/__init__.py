"""The YAML of a run, typed and checked."""
