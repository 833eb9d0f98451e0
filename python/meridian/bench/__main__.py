"""`python -m meridian.bench`: what `meridian bench vllm` runs."""

import sys

from meridian.bench.compare import main

sys.exit(main(sys.argv[1:]))
