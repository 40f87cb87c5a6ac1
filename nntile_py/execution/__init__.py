"""StarPU: its start and stop, native programs, tiles and memory; the C++ below csrc/."""
