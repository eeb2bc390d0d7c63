"""What few bits a weight do to a translator: cross-entropy, bytes, and the time of one decoder step.

    .venv/bin/python benchmarks/few_bits.py            # quality of every variant, in torch; bytes
    .venv/bin/python benchmarks/few_bits.py --steps    # exports four of them and times a decoder step

The figures of docs/measurements/codes.md. Needs the model and the data in ../shared (or --model and --data).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

SHARED = Path(__file__).parent.parent.parent / "shared"
INT4 = {"scheme": "int4"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "int8-dynamic": {"scheme": "int8-dynamic"},
    **{
        f"int4, groups of {size}{'' if symmetric else ', asymmetric'}": INT4
        | {"group_size": size, "symmetric": symmetric}
        for size in (32, 64, 128)
        for symmetric in (True, False)
    },
    "int4, int8 vocabulary": INT4 | {"embedding_scheme": "int8-dynamic"},
    "int4, accuracy_level 0": INT4 | {"accuracy_level": 0},
    "binary, not trained": {"scheme": "binary"},
}
TIMED = ("fp32", "int8-dynamic", "int4, groups of 64", "binary, not trained")


def _artifact(folder: Path) -> Any:
    from smelt.core.artifact import Artifact, Manifest

    names = {"key": "0" * 64, "format": "torch", "task": "translation", "stage": "model"}
    return Artifact(
        folder, Manifest.model_validate({**names, "settings": {}, "seed": 0, "parent": None, "versions": {}})
    )


def _print_quality(folder: Path, rows: Any) -> None:
    import torch

    from smelt.compress.quantize.plan_layers import quantize_model, quantized_weight_bits
    from smelt.compress.quantize.settings import QuantizeSettings
    from smelt.models.checkpoint import load_model, load_tokenizer

    tokenizer = load_tokenizer(folder)
    texts, targets = [r.text for r in rows], [r.references[0] for r in rows]
    batch = tokenizer(texts, text_target=targets, padding=True, return_tensors="pt")
    reference = None
    for name, settings in VARIANTS.items():
        model, _ = load_model(folder)
        if settings is not None:
            quantize_model(model, QuantizeSettings.model_validate(settings))
        with torch.no_grad():
            kept = batch["labels"] != model.config.pad_token_id
            found = model(**batch).logits[kept].log_softmax(-1)
        reference = found if reference is None else reference
        loss = torch.nn.functional.nll_loss(found, batch["labels"][kept])
        away = torch.nn.functional.kl_div(found, reference, reduction="batchmean", log_target=True)
        bits = "" if settings is None else f"{quantized_weight_bits(model):6.3f} bits a weight"
        click.echo(f"{name:34} cross-entropy {loss:.4f}  KL {away:.4f}  {bits}")


def _export(folder: Path, data: Any, settings: dict[str, Any] | None, out: Path) -> Path:
    from smelt.compress.quantize.settings import QuantizeSettings
    from smelt.compress.quantize.stage import Quantize
    from smelt.core.stage import Context
    from smelt.export.onnx_stage import Onnx, OnnxSettings
    from smelt.models.weight_files import find_weights

    def context(name: str) -> Context:
        (out / name).mkdir(parents=True)
        return Context(
            out / name, "translation", {"validation": data}, 0, ancestors={}, score=lambda artifact: {}
        )

    if settings is not None:
        Quantize()(_artifact(folder), QuantizeSettings.model_validate(settings), context("quantized"))
        folder = out / "quantized"
    exported = context("onnx")
    Onnx()(_artifact(folder), OnnxSettings(), exported)
    graphs = sum(path.stat().st_size for path in exported.out.glob("*.onnx"))
    stored = sum(path.stat().st_size for path in find_weights(folder).files)
    click.echo(f"{out.name:34} torch {stored:,} bytes, graphs {graphs:,} bytes, {exported.details['parity']}")
    return exported.out / "decoder_with_past_model.onnx"


def _feeds(session: Any, batch: int) -> dict[str, Any]:
    """Draw one step's inputs: 12 tokens in the cache, 14 source tokens."""
    numbers = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for item in session.get_inputs():
        if item.name == "input_ids":
            feeds[item.name] = numbers.integers(1, 7000, (batch, 1))
        elif item.name == "encoder_attention_mask":
            feeds[item.name] = np.ones((batch, 14), np.int64)
        else:
            length = 14 if ".encoder." in item.name else 12
            shape = (batch, item.shape[1], length, item.shape[3])
            feeds[item.name] = numbers.normal(size=shape).astype(np.float32)
    return feeds


def _time_steps(graphs: dict[str, Path], rounds: int = 60, repeat: int = 5) -> None:
    from smelt.runtimes.onnx_session import open_onnx_session

    sessions = {name: open_onnx_session(path, threads=1) for name, path in graphs.items()}
    for batch in (1, 8):
        feeds = {name: _feeds(session, batch) for name, session in sessions.items()}
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(rounds):
            for name, session in sessions.items():
                start = time.process_time()
                for _ in range(repeat):
                    session.run(None, feeds[name])
                times[name].append((time.process_time() - start) / repeat * 1e3)
        first = statistics.median(times[next(iter(times))])
        for name, values in times.items():
            middle = statistics.median(values)
            click.echo(f"batch {batch}  {name:34} {middle:.3f} ms of processor time  {first / middle:.2f}x")


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=SHARED / "models" / "marian-small-en-de")
@click.option("--data", type=click.Path(path_type=Path), default=SHARED / "data" / "multi30k_en_de")
@click.option("--rows", default=64, show_default=True, help="validation rows for the quality")
@click.option("--steps", is_flag=True, help="export and time a decoder step instead")
def main(model: Path, data: Path, rows: int, steps: bool) -> None:
    """Print a line for each variant."""
    from smelt.data.examples import read_split
    from smelt.data.splits import Columns
    from smelt.evaluate.environment import cpu_model

    split = read_split(str(data / "validation.jsonl.gz"), "translation", Columns(), data)
    click.echo(cpu_model())
    if not steps:
        _print_quality(model, split.examples[:rows])
        return
    with tempfile.TemporaryDirectory() as name:
        graphs = {v: _export(model, split.take(64), VARIANTS[v], Path(name) / v) for v in TIMED}
        _time_steps(graphs)


if __name__ == "__main__":
    main()
