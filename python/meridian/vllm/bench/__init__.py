"""Drives the real vLLM engine for `meridian bench vllm`, and writes down what it sees.

Requests, metrics and tables are the `meridian` command's. vLLM is imported only when an engine is built, each in a
process of its own.
"""
