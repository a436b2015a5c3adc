"""Simulated clusters."""
