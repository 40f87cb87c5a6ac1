"""What a trained model makes of text: continuations, and guesses at masked tokens."""
