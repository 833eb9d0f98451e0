"""Verification on the real engine: figures as data, and the runs that they are read from."""
