"""Access to the operating system: files, time measurement, machine load, memory limits, ranks; output to terminals."""
