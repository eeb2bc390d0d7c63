"""A model with a shortlist of random words: what a list of its length saves where nothing was trained.

python benchmarks/random_list.py MODEL OUT --per-token 20 --frequent 100
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np

from smelt.core.files import read_json_object
from smelt.generation.shortlist import make_shortlist, vocabulary_sizes, write_shortlist


def main() -> None:
    """Copy MODEL, a folder of Hugging Face, to OUT and give it a list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-token", type=int, default=20)
    parser.add_argument("--frequent", type=int, default=100)
    chosen = parser.parse_args()
    shutil.copytree(chosen.model, chosen.out)
    sources, words = vocabulary_sizes(read_json_object(chosen.out / "config.json"))
    table = np.random.default_rng(0).integers(0, words - 1, (sources, chosen.per_token))
    write_shortlist(make_shortlist(table, np.arange(chosen.frequent), words), chosen.out)


if __name__ == "__main__":
    main()
