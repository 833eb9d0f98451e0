"""Puts this folder on the path: its scripts import each other by bare name, as they do when run as scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
