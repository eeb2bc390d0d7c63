"""CTranslate2, used as its pages show it.

A variant with a vocabulary map restricts the output vocabulary by the table of smelt's shortlist: in both,
the candidates of a batch are those of all its source tokens and the ones that are always allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctranslate2

from peer_systems.worker import Case, Job, Opened, Rows, Run, main

# Batches of 512 and 1,024 tokens are the fastest of 128, 256 ... 2,048 for Multi30k; 32 rows are 512
_TOKENS_PER_ROW = 16
MAP = "-vmap"


def make(job: Job) -> None:
    """Convert the model, once for all precisions: weights are quantized when they are loaded."""
    has_map = job["variant"].endswith(MAP)
    if "from" in job and not has_map:
        return
    path = None
    if has_map:
        path = Path(job["files"]).with_suffix(".vmap.txt")
        shortlist = Path(job["from"]) / "run" / "artifacts" / "made" / "shortlist.safetensors"
        path.write_text(vocabulary_map(shortlist, read_pieces(job)), encoding="utf-8")
    extra = ["source.spm", "target.spm"] if job["work"] == "marian" else []
    converter = ctranslate2.converters.TransformersConverter(job["model"], copy_files=extra)
    converter.convert(job["files"], vmap=path and str(path), force=True)


def read_pieces(job: Job) -> dict[int, str]:
    """Return the pieces of the model's vocabulary by token id."""
    tokens = json.loads((Path(job["model"]) / "vocab.json").read_text(encoding="utf-8"))
    return {number: piece for piece, number in tokens.items()}


def vocabulary_map(shortlist: Path, pieces: dict[int, str]) -> str:
    """Return a shortlist as CTranslate2's vmap: lines SOURCE<tab>TARGET TARGET ...

    The line without a source has the tokens that are always candidates.
    Source: https://opennmt.net/CTranslate2/decoding.html#dynamic-vocabulary-reduction
    """
    from safetensors.numpy import load_file

    tensors = load_file(shortlist)
    table, always = tensors["shortlist.table"].tolist(), tensors["shortlist.always"].tolist()
    lists = [("", always), *((pieces[source], sorted(set(row))) for source, row in enumerate(table))]
    lines = [f"{source}\t{' '.join(pieces[token] for token in targets)}\n" for source, targets in lists]
    return "".join(lines)


def serve(job: Job) -> Opened:
    """Open the converted model: text to text for marian, tokens in and out for opus."""
    version = f"CTranslate2 {ctranslate2.__version__}"
    variant = job["variant"].removesuffix(MAP)
    has_map = variant != job["variant"]
    folder: str = job["from"] if "from" in job and not has_map else job["files"]
    translator = ctranslate2.Translator(
        folder,
        device="cpu",
        compute_type=variant,
        inter_threads=job.get("workers", 1),
        intra_threads=job["threads"],
    )
    if job["work"] == "marian":
        return _texts(folder, translator, job.get("workers", 1), has_map), version
    pieces = read_pieces(job)
    tokens = {piece: number for number, piece in pieces.items()}

    def run(rows: Rows, case: Case) -> Rows:
        results = translator.translate_batch(
            [[pieces[token] for token in row] for row in rows],
            beam_size=case["beams"],
            min_decoding_length=case["new_tokens"],
            max_decoding_length=case["new_tokens"],
        )
        return [[tokens[piece] for piece in one.hypotheses[0]] for one in results]

    return run, version


def _texts(folder: str, translator: Any, workers: int, has_map: bool) -> Run:
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
            use_vmap=has_map,
            **(batches if workers > 1 else {}),
        )
        return [target.decode(one.hypotheses[0]) for one in results]

    return translate


if __name__ == "__main__":
    main(make, serve)
