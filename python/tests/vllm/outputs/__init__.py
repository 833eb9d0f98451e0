"""The equality suite: with both classes of Meridian loaded and nothing configured, vLLM's outputs are its own.

`situations.py` has the situations as data, `run.py` runs them on stock vLLM and with Meridian and compares the two.
"""
