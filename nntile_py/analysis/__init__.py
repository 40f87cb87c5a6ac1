"""What a config becomes, told without running it: plans, simulation, drawings."""
