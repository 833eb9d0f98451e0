"""The equality suite: with both classes of Meridian loaded and nothing configured, vLLM's outputs are its own.

`situations.py` has the situations as data, `run.py` runs them on stock vLLM and with Meridian and compares the two.
"""

# Extra arguments of a request: the text that its model says; and that a token that something else forced does not use
# up the text. Here, because the module of the logits processor imports vLLM.
SCRIPT, FOLLOWS = "script", "script_follows"
