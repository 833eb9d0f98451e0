"""`python -m meridian.vllm.bench JOB.json OUT.json`: one run of the engine, as `meridian bench vllm` asks for it."""

import sys

from meridian.vllm.bench.run import main

sys.exit(main(sys.argv[1:]))
