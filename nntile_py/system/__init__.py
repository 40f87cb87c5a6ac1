"""The operating system: folders and files, clock, load, limits of containers and batch jobs, ranks of mpirun."""
