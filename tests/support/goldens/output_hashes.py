"""The bytes that stages and trained tokenizers write, as hashes, for processes to compare.

As a script: prints the hashes of the cases (see golden_cases.py) and tokenizers (`KIND of FAMILY`) that are
its arguments, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.support.goldens import golden
from tests.support.goldens.golden_cases import CASES
from tests.support.models import tiny

# A case of each stage, a quick one.
CASES_OF_STAGES = {
    "finetune": "finetune bert", "distill": "distill bert, half of its layers",
    "trim-vocabulary": "vocabulary marian", "drop-layers": "depth marian, by the loss",
    "drop-experts": "experts mixtral", "prune": "prune bert, within a budget", "sparsify": "sparsify bert",
    "factorize": "factorize bert, plain, by energy", "share-weights": "share bert",
    "rotate": "rotate gpt2", "shortlist": "shortlist marian", "quantize": "quantize gpt2, mixed precision",
    "onnx": "onnx bert, int8 of one scale", "simplify": "simplify graph",
    "quantize-onnx": "quantize-onnx graph, static", "fp16": "fp16 graph",
}  # fmt: skip
# Each kind of trained tokenizer; words of equal frequency, and pieces inside of words, are in tiny.SENTENCES.
TOKENIZERS = ("wordpiece of bert", "bpe of gpt2", "unigram of marian")


def output_hashes(name: str) -> dict[str, str]:
    """Return the sha256 of each file that a case or a tokenizer's training writes."""
    from smelt.core.files import sha256_of

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if name in TOKENIZERS:
            _train_tokenizer(name, out)
        else:
            out = golden.run_case(CASES[name], out)[1]
        files = sorted(path for path in out.rglob("*") if path.is_file())
        return {str(path.relative_to(out)): sha256_of(path) for path in files}


def _train_tokenizer(name: str, out: Path) -> None:
    from smelt.models.new_model import train_tokenizer

    kind, family = name.split(" of ")
    train_tokenizer(
        tiny.SENTENCES, out, family=family, kind=kind, vocab_size=300 if kind == "bpe" else 110, max_length=40
    )


if __name__ == "__main__":
    print(json.dumps({name: output_hashes(name) for name in sys.argv[1:]}))
