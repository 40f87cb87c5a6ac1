"""Operators told element by element: a small language (expression), and what is made of it: numpy, C++, Triton."""
