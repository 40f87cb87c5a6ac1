"""Plans, simulation, analysis and drawings of a config, without running it."""
