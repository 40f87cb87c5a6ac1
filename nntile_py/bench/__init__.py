"""Timing: tasks, steps beside PyTorch, tile sizes, capacity."""
