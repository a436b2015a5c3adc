"""Slow, obvious twins of compiled code, written from its description alone."""
