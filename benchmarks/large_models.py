"""Memory and processor time of stages, export and scoring on random Llamas, 10 million to 3 billion weights.

    python benchmarks/large_models.py 10M 100M --folder build/large
    python benchmarks/large_models.py 3B --stages rtn,gptq --folder build/large
    python benchmarks/large_models.py 3B/2 --stages gptq --folder build/large    # two of its blocks

Models are bfloat16 in shards, one per block, written one by one. Weights are normal with a standard deviation
of 0.02; 1 for the embedding; 0.02 / sqrt(2 blocks), as in GPT-2, for the layers that write into the hidden
states. Each block then changes the states a little, as in trained models. (With 0.02 everywhere the states
are those of the last blocks, and 28 blocks amplify the rounding of activations beyond what the comparison of
an export allows.) Samples are windows of 128 tokens of this repository's pages. Each stage runs in a process
of its own, as on a large model (block by block). A figure is the largest resident memory of that process
(VmHWM) plus that of its children, with mapped files. With N blocks, the time of the whole model is that plus
the time of the last block for each other block. `--json FILE` collects the results; `--table` prints those of
FILE with the exponents of growth between the sizes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent
WINDOW = 128
TOKENS = 2000  # of the tokenizer; the models' vocabularies are those of the shapes
SHAPES: dict[str, dict[str, Any]] = {
    "10M": {
        "hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 896, "vocab_size": 8000, "tie_word_embeddings": True,
    },
    "100M": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
        "intermediate_size": 2048, "vocab_size": 32000, "tie_word_embeddings": True,
    },
    # TinyLlama's shape
    "1B": {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    # Llama 3.2 3B's shape
    "3B": {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    },
}  # fmt: skip
CALIBRATED = {"calibration_samples": 8}
SCORED_LINES = 200
# stage, settings; `after`: the step whose result is its input instead of the model
STAGES: dict[str, dict[str, Any]] = {
    "rtn": {"stage": "quantize", "settings": {"scheme": "int4"}},
    "gptq": {"stage": "quantize", "settings": {"scheme": "int4", "method": "gptq", **CALIBRATED}},
    "awq": {"stage": "quantize", "settings": {"scheme": "int4", "method": "awq", **CALIBRATED}},
    "wanda": {"stage": "sparsify", "settings": {"method": "wanda", **CALIBRATED}},
    "sparsegpt": {"stage": "sparsify", "settings": {"method": "sparsegpt", **CALIBRATED}},
    "svd": {"stage": "factorize", "settings": {"keep_ratio": 0.8, "optimize_for": "size", **CALIBRATED}},
    "asvd": {
        "stage": "factorize",
        "settings": {"keep_ratio": 0.8, "optimize_for": "size", "method": "asvd", **CALIBRATED},
    },
    "prune": {"stage": "prune", "settings": {"targets": ["ffn"], "importance": "magnitude", **CALIBRATED}},
    "block-influence": {"stage": "drop-layers", "settings": {"importance": "block-influence", **CALIBRATED}},
    "onnx-int4": {"stage": "onnx", "settings": {"target": "ort-cpu"}, "after": "rtn"},
    "onnx": {"stage": "onnx", "settings": {"target": "ort-cpu"}},
    "score": {"stage": "score", "settings": {}},
    "score-int4": {"stage": "score", "settings": {}, "after": "rtn"},
    "score-onnx-int4": {"stage": "score", "settings": {}, "after": "onnx-int4"},
}


def model_shape(name: str) -> dict[str, Any]:
    """Return the config values of `SHAPE` or `SHAPE/BLOCKS`."""
    shape, _, blocks = name.partition("/")
    return SHAPES[shape] | ({"num_hidden_layers": int(blocks)} if blocks else {})


def write_llama(name: str, folder: Path) -> None:
    """Write a random Llama with a tokenizer into `folder`, one shard at a time."""
    import torch
    import transformers
    from accelerate import init_empty_weights
    from safetensors.torch import save_file

    from smelt.models.new_model import train_tokenizer

    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    train_tokenizer(_page_lines(), part, family="llama", kind="bpe", vocab_size=TOKENS, max_length=WINDOW)
    config = transformers.LlamaConfig(
        **model_shape(name), max_position_embeddings=WINDOW, architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(part)
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, parameter in model.named_parameters():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        block = key.split(".")[2] if key.startswith("model.layers.") else key
        shards.setdefault(block, {})[key] = tuple(parameter.shape)
    torch.manual_seed(0)
    places: dict[str, str] = {}
    size = 0
    for number, shapes in enumerate(shards.values(), start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        drawn = {key: _drawn_weight(key, shape, config) for key, shape in shapes.items()}
        save_file(drawn, part / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shapes, file)
        size += sum(tensor.nbytes for tensor in drawn.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    part.rename(folder)


def _drawn_weight(name: str, shape: tuple[int, ...], config: Any) -> Any:
    """Return a random weight, bfloat16; logits have a standard deviation of about one."""
    import torch

    if len(shape) == 1:
        small = name == "model.norm.weight" and config.tie_word_embeddings
        return torch.full(shape, 0.02 if small else 1.0, dtype=torch.bfloat16)
    deviation = 1.0 if name == "model.embed_tokens.weight" else 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, deviation)


def _page_lines() -> list[str]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [line for page in pages for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]


def _status_bytes(pid: int | str, word: str) -> int:
    """Return a value of /proc/PID/status, bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:")), 0)


def _descendants(pid: int | str) -> list[int]:
    """Return the children of a process, and theirs."""
    found = []
    for threads in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in threads.read_text(encoding="ascii").split()]
        except OSError:
            continue
    return found + [other for child in found for other in _descendants(child)]


class ChildPeaks:
    """The largest VmHWM of each child process, looked at four times a second."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            for child in _descendants("self"):
                self.peaks[child] = max(self.peaks.get(child, 0), _status_bytes(child, "VmHWM"))

    def stop(self) -> int:
        """Return the largest of them, bytes."""
        self._done.set()
        self._thread.join()
        return max(self.peaks.values(), default=0)


def run_stage(source: Path, stage: str, out: Path, threads: int, lines: int = SCORED_LINES) -> dict[str, Any]:
    """Run one stage in this process and write `out`; return processor seconds and bytes.

    lines: of the text that are scored.
    """
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 - what is imported is counted apart

    from smelt.core.artifact import Artifact, Manifest
    from smelt.data.splits import Columns
    from smelt.models import weight_files
    from smelt.pipeline.recipe.stages import load_stage
    from smelt.stage import Context
    from smelt.tasks.read_split import read_split

    vars(weight_files)["LARGE_BYTES"] = 0
    torch.set_num_threads(threads)
    text = out.with_suffix(".txt")
    text.write_text("\n".join(_page_lines()[:600]), encoding="utf-8")
    data = {"train": read_split(str(text), "language-modeling", Columns(), text.parent)}
    onnx = (source / "model.onnx").is_file()
    details = json.loads((source / "details.json").read_text()) if onnx else {}
    manifest = Manifest(
        key="0", format="onnx" if onnx else "torch", task="language-modeling", stage="model", settings={},
        seed=0, parent=None, versions={}, details=details,
    )  # fmt: skip
    artifact = Artifact(source, manifest)
    imported, children = _status_bytes("self", "VmHWM"), ChildPeaks()
    cpu, clock = _cpu_seconds(), time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    spec = STAGES[stage]
    result: dict[str, Any] = {}
    marks = [cpu]

    def progress(done: int, total: int, note: str = "") -> None:
        marks.append(_cpu_seconds())

    if spec["stage"] == "score":
        result["lines"] = lines
        result["perplexity"] = score(artifact, data["train"].take(lines), threads, out)
    else:
        cls: Any = load_stage(spec["stage"])
        ctx = Context(
            out, "language-modeling", data, 0, {"model": artifact}, score=lambda *_: {}, threads=threads,
            device="cpu", progress=progress,
        )  # fmt: skip
        cls()(artifact, cls.settings_type.model_validate(spec["settings"]), ctx)
        kept = {key: ctx.details[key] for key in ("target", "dtype") if key in ctx.details}
        (out / "details.json").write_text(json.dumps(kept))
        result["warnings"] = sorted({warning.code for warning in ctx.warnings})
    return result | {
        "cpu_s": round(_cpu_seconds() - cpu, 2),
        "block_cpu_s": round(marks[-1] - marks[-2], 2) if len(marks) > 2 else 0.0,
        "clock_s": round(time.monotonic() - clock, 1),
        "imported_bytes": imported,
        "peak_bytes": _status_bytes("self", "VmHWM"),
        "child_peak_bytes": children.stop(),
        "out_bytes": sum(path.stat().st_size for path in out.iterdir() if path.is_file()),
    }


def score(artifact: Any, split: Any, threads: int, out: Path) -> float:
    """Return the perplexity of an artifact on the first lines of the text."""
    from smelt.core.store import Store
    from smelt.generation.config import GenerationSettings
    from smelt.pipeline.execute.scoring import Scorer

    scorer = Scorer(
        Store(out), "language-modeling", ["perplexity"], GenerationSettings(), 8, threads, device="cpu"
    )
    return float(scorer.score(artifact, split)["quality"]["perplexity"]["value"])


def _cpu_seconds() -> float:
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def measure(name: str, stage: str, folder: Path, threads: int, lines: int = SCORED_LINES) -> dict[str, Any]:
    """Run a stage on the model `name` in a process of its own; return its figures."""
    model, out = folder / name.replace("/", "-"), folder / f"{name.replace('/', '-')}.{stage}"
    if not model.is_dir():
        write_llama(name, model)
    after = STAGES[stage].get("after")
    source = folder / f"{name.replace('/', '-')}.{after}" if after else model
    if not source.is_dir():
        measure(name, str(after), folder, threads)
    command = [sys.executable, __file__, "--worker", f"{source}", f"{out}", "--stages", stage]
    command += ["--threads", f"{threads}", "--lines", f"{lines}"]
    environment = os.environ | {"OMP_NUM_THREADS": f"{threads}"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    printed = done.stdout.splitlines()
    found = json.loads(printed[-1]) if done.returncode == 0 else {"failed": done.returncode}
    row = {"model": name, "stage": stage, "threads": threads, **model_sizes(model), **found}
    shape = SHAPES[name.partition("/")[0]]
    missing = shape["num_hidden_layers"] - model_shape(name)["num_hidden_layers"]
    if "cpu_s" in row:
        row["whole_cpu_s"] = round(row["cpu_s"] + missing * row["block_cpu_s"], 1)
    return row | {"whole_parameters": row["parameters"] + missing * row["block_parameters"]}


def model_sizes(folder: Path) -> dict[str, int]:
    """Return the numbers of parameters of the model and of one of its blocks, and the bytes of its files."""
    from smelt.models.weight_files import value_count, weight_tensors

    counts = {name: value_count(entry) for _, name, entry in weight_tensors(folder)}
    block = sum(count for name, count in counts.items() if name.startswith("model.layers.0."))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"parameters": sum(counts.values()), "block_parameters": block, "file_bytes": size}


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the figures by stage and model, with the exponents of growth from the model before."""
    click.echo("|stage|model|parameters|CPU s|peak MB|CPU s grow as|peak grows as|\n|:--|" + "--:|" * 6)
    for stage in STAGES:
        rows = [row for row in results if row["stage"] == stage and "failed" not in row]
        rows = list({row["whole_parameters"]: row for row in sorted(rows, key=_block_count)}.values())
        rows.sort(key=lambda row: row["whole_parameters"])
        for before, row in zip([None, *rows], rows, strict=False):
            grown = ["", ""]
            if before is not None:
                more = math.log(row["whole_parameters"] / before["whole_parameters"])
                grown = [f"n^{math.log(_figure(row, i) / _figure(before, i)) / more:.2f}" for i in (0, 1)]
            peak = _figure(row, 1) / 1e6
            click.echo(
                f"|{stage}|{row['model']}|{row['whole_parameters'] / 1e6:,.0f} M|{_figure(row, 0):,.1f}|"
                f"{peak:,.0f}|{grown[0]}|{grown[1]}|"
            )


def _block_count(row: dict[str, Any]) -> int:
    return int(model_shape(row["model"])["num_hidden_layers"])


def _figure(row: dict[str, Any], which: int) -> float:
    return float((row["whole_cpu_s"], row["peak_bytes"] + row["child_peak_bytes"])[which])


@click.command()
@click.argument("models", nargs=-1)
@click.option("--stages", default=",".join(STAGES), show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=ROOT / "build" / "large")
@click.option("--threads", default=1, show_default=True)
@click.option("--lines", default=SCORED_LINES, show_default=True, help="lines of text that are scored")
@click.option("--json", "collected", type=click.Path(path_type=Path), help="file of all results")
@click.option("--keep", is_flag=True, help="keep the results of stages that other stages do not need")
@click.option("--table", is_flag=True, help="print the results of --json")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    models: tuple[str, ...], stages: str, folder: Path, threads: int, lines: int, collected: Path | None,
    keep: bool, table: bool, worker: bool,
) -> None:  # fmt: skip
    """Measure each of the stages on each of the models 10M, 100M, 1B, 3B (SHAPE/N: with N blocks)."""
    if worker:
        source, out = map(Path, models)
        click.echo(json.dumps(run_stage(source, stages, out, threads, lines)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    needed = {str(spec["after"]) for spec in STAGES.values() if "after" in spec}
    for name in models:
        for stage in stages.split(","):
            row = measure(name, stage, folder.resolve(), threads, lines)
            click.echo(json.dumps(row))
            if collected is not None:
                rows = json.loads(collected.read_text()) if collected.is_file() else []
                rows = [old for old in rows if (old["model"], old["stage"]) != (name, stage)]
                collected.write_text(json.dumps([*rows, row], indent=1))
            if not keep and stage not in needed:
                shutil.rmtree(folder / f"{name.replace('/', '-')}.{stage}", ignore_errors=True)
    if table and collected is not None:
        print_table(json.loads(collected.read_text()))


if __name__ == "__main__":
    main()
