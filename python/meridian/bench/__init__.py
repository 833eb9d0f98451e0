"""The real vLLM engine under load, with stock vLLM's scheduler and with Meridian's: `meridian bench vllm`.

vLLM is imported only when an engine is built. Every engine runs in a process of its own (`engine_run`).
"""
