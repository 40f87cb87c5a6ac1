"""Passes that rewrite the graph of a step; `nntile_py.graph.fusion` says in which order the fusion passes run."""
