"""Formulas of operators for one element: expressions, their evaluation in numpy, and kernels generated from them."""
