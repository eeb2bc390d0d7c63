"""Whether speculation by n-grams pays in greedy search: tokens per decoder step, and what such steps cost.

    python benchmarks/ngram_speculation.py MODEL TRAIN.jsonl.gz TEST.jsonl.gz --artifacts ONNX ... --limit 300

Outputs are those of transformers' greedy search, or with --references the words of the data's targets. A step
verifies its draft in one call: it returns the tokens of the draft that greedy search returns, and one more.
Drafts:

- lookup: what follows the last occurrence of the last n tokens in the output, else in the source
  (Saxena 2023, prompt lookup decoding)
- table: the most frequent next token after the last n tokens in the targets of TRAIN

Then the cost of a step of several positions of one text, in CPU time of the decoder's graph with --cached
tokens (and as many of a source), all numbers of positions in turns. A mask is left as it is, since costs do
not depend on it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

Draft = Callable[[list[int], list[int]], list[int]]
"""Returns the drafted tokens for source and output so far."""
DRAFT_LENGTHS = (1, 2, 3)
POSITIONS = (1, 2, 3, 4)
END = 0  # after the words of a text
CALLS = 20  # of a graph in a round


def read(path: Path, limit: int | None = None) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream][:limit]


def lookup(longest: int, length: int) -> Draft:
    """Return the drafts of prompt lookup for at most `longest` tokens of context."""

    def draft(source: list[int], output: list[int]) -> list[int]:
        for n in range(min(longest, len(output)), 0, -1):
            for text in (output, source):
                for end in range(len(text) - 1, n - 1, -1):
                    if text[end - n : end] == output[-n:]:
                        return text[end : end + length]
        return []

    return draft


def table(targets: Iterable[list[int]], longest: int, length: int) -> Draft:
    """Return the drafts of a table of the targets' n-grams of up to `longest` tokens of context."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for target in targets:
        for end in range(1, len(target)):
            for n in range(1, min(longest, end) + 1):
                counts[tuple(target[end - n : end])][target[end]] += 1
    best = {context: count.most_common(1)[0][0] for context, count in counts.items()}

    def draft(source: list[int], output: list[int]) -> list[int]:
        text = list(output)
        for _ in range(length):
            contexts = (tuple(text[-n:]) for n in range(min(longest, len(text)), 0, -1))
            token = next((best[context] for context in contexts if context in best), None)
            if token is None:
                break
            text.append(token)
        return text[len(output) :]

    return draft


def tokens_per_step(pairs: Sequence[tuple[list[int], list[int]]], draft: Draft) -> tuple[float, float]:
    """Return the tokens of a step, and the drafted tokens of a step."""
    tokens = steps = drafted = 0
    for source, output in pairs:
        done = 0
        while done < len(output):
            guess = draft(source, output[:done]) if done else []
            accepted = 0
            while accepted < len(guess) and guess[accepted : accepted + 1] == output[done + accepted :][:1]:
                accepted += 1
            done += accepted + 1
            steps, drafted = steps + 1, drafted + len(guess)
        tokens += len(output)
    return tokens / steps, drafted / steps


def word_ids(texts: Iterable[str]) -> list[list[int]]:
    """Return a number for each word, and one for the end of a text; the same word has the same everywhere."""
    return [[*map(hash, re.findall(r"#\w+#|\w+|[^\w\s]", text)), END] for text in texts]


def greedy_outputs(model: Any, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    outputs: list[list[int]] = []
    for start in range(0, len(texts), 16):
        batch = tokenizer(texts[start : start + 16], return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            rows = model.generate(**batch, num_beams=1, do_sample=False)[:, 1:].tolist()
        ends = (
            row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row) for row in rows
        )
        outputs += [row[: end + 1] for row, end in zip(rows, ends, strict=True)]
    return outputs


def open_steps(artifact: Path) -> onnxruntime.InferenceSession:
    """Open the decoder's graph of one step for one text and any number of positions."""
    decoder = artifact / "decoder_with_past_model.onnx"
    model = onnx.load(decoder if decoder.exists() else artifact / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        if value.name in ("input_ids", "logits"):
            value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT64 and list(tensor.dims) == [3]:
            shape = numpy_helper.to_array(tensor)
            if list(shape[:2]) == [-1, 1]:  # rows of one position
                tensor.CopyFrom(numpy_helper.from_array(np.array([1, -1, shape[2]]), tensor.name))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def make_feeds(session: onnxruntime.InferenceSession, positions: int, cached: int) -> dict[str, Any]:
    known = {
        "input_ids": np.full((1, positions), 7),
        "encoder_attention_mask": np.ones((1, cached), np.int64),
        "attention_mask": np.ones((1, cached + positions), np.int64),
        "position_ids": np.arange(cached, cached + positions)[None],
    }
    inputs = session.get_inputs()
    feeds: dict[str, Any] = {value.name: known[value.name] for value in inputs if value.name in known}
    caches = (value for value in inputs if value.name not in known)
    return feeds | {
        value.name: np.ones((1, value.shape[1], cached, value.shape[3]), np.float32) for value in caches
    }


def step_costs(artifact: Path, rounds: int, cached: int) -> dict[int, list[float]]:
    """Return the microseconds of a step by its positions, one of each round."""
    session = open_steps(artifact)
    feeds = {positions: make_feeds(session, positions, cached) for positions in POSITIONS}
    times: dict[int, list[float]] = {positions: [] for positions in POSITIONS}
    for _ in range(rounds):
        for positions, inputs in feeds.items():
            start = time.process_time()
            for _ in range(CALLS):
                session.run(None, inputs)
            times[positions].append((time.process_time() - start) / CALLS * 1e6)
    return times


def main() -> None:
    """Print two tables in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--columns", nargs=2, default=["source", "target"])
    parser.add_argument("--references", action="store_true")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--artifacts", nargs="*", type=Path, default=[])
    parser.add_argument("--cached", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, target = options.columns
    rows, train_rows = read(options.test, options.limit), read(options.train)
    if options.references:
        sources = word_ids(row[source] for row in rows)
        outputs, targets = (word_ids(row[target] for row in split) for split in (rows, train_rows))
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model, dtype=torch.float32)
        sources = [tokenizer(row[source]).input_ids for row in rows]
        outputs = greedy_outputs(model, tokenizer, [row[source] for row in rows])
        targets = [tokenizer(text_target=row[target]).input_ids for row in train_rows]
    pairs = list(zip(sources, outputs, strict=True))
    print("| draft | context | drafted tokens | tokens per step | drafted per step |\n|:--|--:|--:|--:|--:|")
    for longest in (1, 2, 3):
        for length in DRAFT_LENGTHS:
            drafts = {"lookup": lookup(longest, length), "table": table(targets, longest, length)}
            for name, draft in drafts.items():
                tokens, drafted = tokens_per_step(pairs, draft)
                print(f"| {name} | {longest} | {length} | {tokens:.3f} | {drafted:.2f} |")
    print(
        f"\n| artifact | {' | '.join(f'{n} positions' for n in POSITIONS)} |\n|:--|{'--:|' * len(POSITIONS)}"
    )
    for artifact in options.artifacts:
        times = step_costs(artifact, options.rounds, options.cached)
        cells = []
        for positions in POSITIONS:
            ratios = [ours / one for ours, one in zip(times[positions], times[1], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if positions > 1 else (1.0, 1.0, 1.0)
            cells.append(f"{min(times[positions]):.0f} µs, {middle:.2f} [{low:.2f}, {high:.2f}]")
        print(f"| {artifact.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
