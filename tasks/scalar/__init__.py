"""Operators defined per element: expressions, their evaluation in numpy, generated C++ and Triton kernels."""
