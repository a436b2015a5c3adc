"""Packaged files: scenarios, training hyperparameters, configurations and prompts of LLMs."""
