"""A config measured at many points, searches of tile sizes, and the experiments that stand on sweeps."""
