"""Packaged YAML files: scenarios and training hyperparameters."""
