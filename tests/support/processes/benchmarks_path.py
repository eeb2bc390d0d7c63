"""Importing this makes the scripts in `benchmarks` importable, as they are for each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
