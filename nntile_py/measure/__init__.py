"""Measuring: steps beside PyTorch, sweeps, experiments, the cost of tasks and messages."""
