"""Python runs this at its start where this folder is on PYTHONPATH: vLLM's processes then sleep while they wait.

vLLM's queues between processes call `os.sched_yield` until a message comes (shm_broadcast.py). Linux 6.18 moves a
thread behind all others of its core at each yield, so that a process with a message to read can wait for a quarter of a
second where engines have more processes than cores.
"""

import os
import time

os.sched_yield = lambda: time.sleep(5e-5)
