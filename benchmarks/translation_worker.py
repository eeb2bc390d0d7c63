"""A system of beside_ctranslate2.py: it reads lists of texts as JSON lines and says what they took.

Needs what the system needs and nothing else, so that it runs in an environment without smelt too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
LONGEST = 128
Translate = Callable[[list[str]], list[str]]


def smelt_system(artifact: str) -> tuple[Translate, str]:
    """Return what translates a list of texts with smelt, and who that is."""
    import onnxruntime

    import smelt

    model = smelt.load(artifact, threads=1)
    wanted = {"max_new_tokens": LONGEST}
    return (
        lambda texts: model.generate(texts, batch_size=len(texts), **wanted)
    ), f"smelt, ONNX Runtime {onnxruntime.__version__}"


def ctranslate2_system(folder: str, compute_type: str) -> tuple[Translate, str]:
    """Return what translates a list of texts with CTranslate2, as its pages show it."""
    import ctranslate2
    import sentencepiece

    source = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/source.spm")
    target = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/target.spm")
    translator = ctranslate2.Translator(
        folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=1
    )

    def translate(texts: list[str]) -> list[str]:
        pieces = [[*source.encode(text, out_type=str), "</s>"] for text in texts]
        found = translator.translate_batch(pieces, beam_size=1, max_decoding_length=LONGEST)
        return [target.decode(one.hypotheses[0]) for one in found]

    return translate, f"CTranslate2 {ctranslate2.__version__}"


SYSTEMS: dict[str, Callable[..., tuple[Translate, str]]] = {
    "smelt": smelt_system,
    "ctranslate2": ctranslate2_system,
}


def run(translate: Translate, request: dict[str, Any]) -> dict[str, Any]:
    """Translate the request's texts, `batch_size` at a time."""
    texts, size = request["texts"], request["batch_size"]
    made: list[str] = []
    cpu, wall = time.process_time(), time.perf_counter()
    for at in range(0, len(texts), size):
        made += translate(texts[at : at + size])
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "texts": made}


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")  # libraries print to standard output
    os.dup2(2, 1)
    translate, version = SYSTEMS[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(translate, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
