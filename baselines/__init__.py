"""Training, honest evaluation, reports and the command line."""
