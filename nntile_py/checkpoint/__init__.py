"""Checkpoints of a run: their format, when they are written, and how a run resumes."""
