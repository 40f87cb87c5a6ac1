"""Data to train on: text, tables, tokenizers, and the batches that models take."""
