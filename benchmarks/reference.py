"""What transformers and sacrebleu say of an untouched translator, without any of smelt.

    python benchmarks/reference.py MODEL TEST.jsonl.gz [BEAMS]

The number that the first row of a report must equal. Greedy, or with BEAMS beam search;
at most 128 new tokens, float32.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

BATCH = 32


def main(model_folder: str, test_file: str, beams: str = "1") -> None:
    """Translate the column `source` of the file and score it against `target`."""
    rows = [json.loads(line) for line in gzip.decompress(Path(test_file).read_bytes()).decode().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    texts = []
    start = time.perf_counter()
    for at in range(0, len(rows), BATCH):
        batch = [row["source"] for row in rows[at : at + BATCH]]
        inputs = tokenizer(batch, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = model.generate(**inputs, num_beams=int(beams), do_sample=False, max_new_tokens=128)
        texts += tokenizer.batch_decode(out, skip_special_tokens=True)
    seconds = time.perf_counter() - start
    references = [[row["target"] for row in rows]]
    bleu, chrf = sacrebleu.corpus_bleu(texts, references), sacrebleu.corpus_chrf(texts, references)
    print(f"n {len(rows)}  beams {beams}  BLEU {bleu.score:.4f}  chrF {chrf.score:.2f}  {seconds:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
