"""Mutated input for the command line: `main` prints what ended as it must not.

Each draw changes one file a few times, seeded by its number, and gives it to the commands that read such a
file. Every end is allowed but: an exception, an error that smelt did not foresee, 20 seconds, 3 GB.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

SECONDS, MEMORY = 20, 3 << 30
ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 10**30, 1e308, float("nan"), float("inf"), "", "a", [], {}, [None], {"a": None}),
    *("x" * 100_000, "\ud800", "\u202e\x1b[31m", "../../etc/passwd", "a\0b", "9" * 400, [[]] * 50, "|<b>`"),
    *(2**31, -(2**63), 10_000_000, 0.5, "(?<=a+)b", "\\p{", "true", "1"),
]
ODD_BYTES = [
    b"", b"\0", b"\xff\xfe", b'"', b"{", b"}", b"[" * 2000, b"\n", b"\t", b",", b"1e999", b"\xed\xa0\x80",
    b"\r",
]  # fmt: skip


OUTCOMES = Counter[int]()  # how many commands ended with which exit code


class DrawTimeout(BaseException):
    """A draw took longer than it may; not an Exception, which somebody could catch."""


@dataclass(frozen=True)
class FuzzKind:
    """What is changed and who reads it. files: of which a draw changes one. commands: lines, `{home}`."""

    files: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


KINDS = {
    "recipes": FuzzKind(("recipe.yaml",), (("plan", "recipe.yaml"),)),
    "configs": FuzzKind(("m/config.json", "m/generation_config.json"),
        (("plan", "recipe.yaml"), ("init", "m", "--data", "data.jsonl"))),
    "tokenizers": FuzzKind(("a/tokenizer.json", "a/tokenizer_config.json", "a/vocab.txt",
        "a/tokenizing.json"), (("predict", "a", "a man rides"), ("package", "a", "--out", "p"))),
    "manifests": FuzzKind(("a/manifest.json",),
        (("predict", "a", "a man rides"), ("package", "a", "--out", "p"))),
    "reports": FuzzKind(("run/report.json",),
        (("report", "run"), ("package", "run/artifacts/onnx", "--out", "p"))),
    "rows": FuzzKind(("data.jsonl", "data.csv", "data.tsv"),
        tuple(("eval", "a", "--data", f"data.{end}") for end in ("jsonl", "csv", "tsv"))),
    "onnx": FuzzKind(("a/model.onnx",), (("predict", "a", "a man rides"),)),
    "foreign": FuzzKind(("g.onnx",), (("init", "g.onnx"),)),
    "images": FuzzKind(("images-images/0.png", "v/preprocessor_config.json"),
        (("eval", "v", "--data", "images.jsonl"),)),
}  # fmt: skip


def fuzz(kind: str, draws: int, home: Path, first: int = 0) -> Iterator[str]:
    """Yield a line for each of `draws` mutations that ended as none may.

    home: a folder with the files of the kind, as `prepare` leaves it; it is copied for each draw.
    """
    for number in range(first, first + draws):
        draw = random.Random(f"{kind} {number}")
        work = home.parent / "draw"
        shutil.copytree(home, work, symlinks=True)
        try:
            name = draw.choice([name for name in KINDS[kind].files if (work / name).exists()])
            path = (work / name).resolve()
            if home in path.parents:  # a link into the folder that is copied
                path = work / path.relative_to(home)
            path.write_bytes(mutate(draw, name, path.read_bytes()))
            _update_manifest(path)
            for command in KINDS[kind].commands:
                if (end := _run_command(command, work)) is not None:
                    yield f"{kind} {number}: {name}: smelt {' '.join(command)}: {end}"
        finally:
            shutil.rmtree(work)


def mutate(draw: random.Random, name: str, content: bytes) -> bytes:
    """Return `content` with one to three changes: of values where it is JSON or YAML, else of bytes."""
    if name.endswith((".json", ".yaml")) and draw.random() < 0.8:
        value = json.loads(content) if name.endswith(".json") else YAML(typ="safe").load(content)
        for _ in range(draw.randint(1, 3)):
            value = _mutate_value(draw, value)
        return json.dumps(value).encode("utf-8", "surrogatepass")
    mutated = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        offset = draw.randrange(len(mutated) + 1)
        mutated[offset : offset + draw.choice([0, 1, 1, 8, 200])] = draw.choice(
            [*ODD_BYTES, draw.randbytes(4)]
        )
    return bytes(mutated[: draw.randrange(len(mutated) + 1)] if draw.random() < 0.1 else mutated)


def _mutate_value(draw: random.Random, value: Any) -> Any:
    """Return a JSON value in which one value, near the top rather than deep inside, is another or gone."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(ODD_VALUES)
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if draw.random() < 0.15:
        if isinstance(value, dict):
            return {name: inner for name, inner in value.items() if name != key}
        return value[:key] + value[key + 1 :]
    value[key] = _mutate_value(draw, value[key])
    return value


def _update_manifest(path: Path) -> None:
    """Have the manifest next to `path`, where there is one, list its bytes, as whoever changed it would."""
    from smelt.core.files import sha256_of, write_hashed_json

    manifest = path.parent / "manifest.json"
    if path == manifest:
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # no JSON object
            write_hashed_json(manifest, json.loads(manifest.read_bytes()))
    elif manifest.is_file():
        content = json.loads(manifest.read_text())
        if path.name in content["files"]:
            content["files"][path.name] = {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
            write_hashed_json(manifest, content)


def _run_command(words: tuple[str, ...], work: Path) -> str | None:
    """Return how the command line ended in `work` if it must not end so."""
    import os

    from click.testing import CliRunner

    from smelt.cli.main import main

    def too_long(*_: Any) -> None:
        raise DrawTimeout

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    before = Path.cwd()
    os.chdir(work)
    try:
        result = CliRunner().invoke(main, list(words))
    except BaseException as error:  # TooLong, and what a Rust library raises, are no Exceptions
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        os.chdir(before)
    OUTCOMES[result.exit_code] += 1
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {str(result.exception)[:300]}"
    if "[unforeseen]" in result.output or "Traceback" in result.output:
        return result.output[-600:]
    return "an error of more than 20,000 characters" if len(result.output) > 20_000 else None


def write_files(home: Path, kind: str) -> None:
    """Write the files of `kind` into the new folder `home`."""
    from tests.support.graphs import exported_artifacts, imported_graphs
    from tests.support.models import images, tiny

    home.mkdir()
    tiny.write_labeled(home / "data.jsonl", 8)
    rows = [json.loads(line) for line in (home / "data.jsonl").read_text().splitlines()]
    for end, sign in (("csv", ","), ("tsv", "\t")):
        lines = [sign.join(rows[0]), *(sign.join(str(value) for value in row.values()) for row in rows)]
        (home / f"data.{end}").write_text("\n".join(lines) + "\n")
    if kind in ("recipes", "configs"):
        tiny.write_bert(home / "m")
        (home / "recipe.yaml").write_text(TEXT_RECIPE)
    if kind in ("tokenizers", "manifests", "rows", "onnx"):
        shutil.copytree(exported_artifacts.exported_artifact("classifier").resolve(), home / "a")
    if kind == "reports":
        run = exported_artifacts.exported_artifact("classifier").parent.parent
        shutil.copytree(run, home / "run", symlinks=False)
    if kind == "foreign":
        imported_graphs.save_model(imported_graphs.two_layer_classifier(), home / "g.onnx")
    if kind == "images":
        import smelt

        images.write_model(home / "m")
        images.write_rows(home / "images.jsonl")
        (home / "recipe.yaml").write_text(IMAGE_RECIPE)
        smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)
        shutil.copytree(home / "run" / "artifacts" / "onnx", home / "v")


TEXT_RECIPE = """model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl, columns: {label: label}}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: taylor}
    name: small
  - distill: {teacher: small, losses: {logits: 1.0, labels: 0.5}, student: {layers: 1}, epochs: 2}
  - quantize: {scheme: int8-dynamic}
  - onnx: {target: ort-cpu}
    from: small
    optional: true
score:
  quality: [accuracy, f1]
  latency: {batch_sizes: [1, 8], threads: 2}
baseline: small
gates:
  accuracy: {max_degradation: 1.0, at: [quantize]}
seed: 3
"""
IMAGE_RECIPE = """model: m
task: image-classification
data: {test: images.jsonl}
stages: [onnx]
score: {latency: false}
"""


def main(kind: str, draws: int, home: Path, first: int = 0) -> int:
    """Print what ended as it must not; return how many, 100 at most. For a process of its own."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        failures = list(fuzz(kind, draws, home, first))
    print("\n".join(failures))
    print(f"{kind}: {dict(OUTCOMES)}", file=sys.stderr)
    return min(100, len(failures))
