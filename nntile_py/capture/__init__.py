"""Captures any PyTorch module as a graph on named axes."""
