"""Run trained models on text: encode texts, continue prompts, guess masked tokens."""
