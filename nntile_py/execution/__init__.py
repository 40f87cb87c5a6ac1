"""All use of StarPU: its start and stop, native programs, tiles and memory. The C++ code is in csrc/."""
