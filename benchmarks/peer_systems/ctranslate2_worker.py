"""CTranslate2, used as its pages show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctranslate2

from peer_systems.worker import Case, Job, Opened, Rows, Run, main

# Batches of 512 and 1,024 tokens are the fastest of 128, 256 ... 2,048 for Multi30k; 32 rows are 512
_TOKENS_PER_ROW = 16


def make(job: Job) -> None:
    """Convert the model, once for all precisions: weights are quantized when they are loaded."""
    if "from" in job:
        return
    extra = ["source.spm", "target.spm"] if job["work"] == "marian" else []
    converter = ctranslate2.converters.TransformersConverter(job["model"], copy_files=extra)
    converter.convert(job["files"], force=True)


def serve(job: Job) -> Opened:
    """Open the converted model: text to text for marian, tokens in and out for opus."""
    version = f"CTranslate2 {ctranslate2.__version__}"
    folder: str = job["from"] if "from" in job else job["files"]
    translator = ctranslate2.Translator(
        folder,
        device="cpu",
        compute_type=job["variant"],
        inter_threads=job.get("workers", 1),
        intra_threads=job["threads"],
    )
    if job["work"] == "marian":
        return _texts(folder, translator, job.get("workers", 1)), version
    tokens = json.loads((Path(job["model"]) / "vocab.json").read_text(encoding="utf-8"))
    pieces = {number: piece for piece, number in tokens.items()}

    def run(rows: Rows, case: Case) -> Rows:
        results = translator.translate_batch(
            [[pieces[token] for token in row] for row in rows],
            beam_size=case["beams"],
            min_decoding_length=case["new_tokens"],
            max_decoding_length=case["new_tokens"],
        )
        return [[tokens[piece] for piece in one.hypotheses[0]] for one in results]

    return run, version


def _texts(folder: str, translator: Any, workers: int) -> Run:
    import sentencepiece

    source = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/source.spm")
    target = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/target.spm")

    def translate(texts: Rows, case: Case) -> Rows:
        pieces = [[*source.encode(text, out_type=str), "</s>"] for text in texts]
        batches = {"max_batch_size": _TOKENS_PER_ROW * case["batch"], "batch_type": "tokens"}
        results = translator.translate_batch(
            pieces,
            beam_size=case["beams"],
            max_decoding_length=case["new_tokens"],
            **(batches if workers > 1 else {}),
        )
        return [target.decode(one.hypotheses[0]) for one in results]

    return translate


if __name__ == "__main__":
    main(make, serve)
