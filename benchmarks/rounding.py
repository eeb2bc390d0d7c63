"""Ways to choose quantized weights, compared on held-out samples: loss and divergence, in pairs.

    python benchmarks/rounding.py --model ../shared/models/marian-small-en-de \
        --data ../shared/data/multi30k_en_de/{}.jsonl.gz --out runs/rounding/marian
    python benchmarks/rounding.py --model runs/llama/artifacts/trained --task language-modeling \
        --data ../shared/data/wikitext2/{}.txt.gz --window 128 --out runs/rounding/llama

Every arm quantizes the same model on the same calibration samples, drawn from `train`. The model with the
dequantized weights is compared with the float model on `test`, in nats per token, or per text of a
classifier: by its loss, and by the Kullback-Leibler divergence of its predictions from the float model's;
and by the percentage of right predictions. Brackets are 95 % intervals of the mean difference, by a
bootstrap over samples. Results are stored in OUT/losses.json; arms that are there are not run again.

With `--peers PYTHON`, the Python of an environment with llm-compressor and GPTQModel, the arms of PEERS are
made on the same calibration tokens (benchmarks/peer_systems/rounding_worker.py). Only the linear layers of
blocks are quantized then, in every arm:

    python -m venv peers && peers/bin/pip install llmcompressor==0.14.0 gptqmodel
    python benchmarks/rounding.py --peers peers/bin/python --model ... --data ... --out runs/peers/llama
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import smelt
from smelt.calibration.samples import draw_samples, load_calibration_samples, make_batches
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.data.splits import Columns, Split, Windows
from smelt.models.checkpoint import load_model
from smelt.models.edits import replace_module
from smelt.models.families.registry import blocks_of
from smelt.quantization.layers import QuantizedLinear
from smelt.stage import Context
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import IGNORE_INDEX, load_processor

FORMS: dict[str, dict[str, Any]] = {
    "int4 g128": {"scheme": "int4", "group_size": 128},
    "int4 g32": {"scheme": "int4", "group_size": 32},
    "int3 g64": {"scheme": "int3", "group_size": 64},
    "int2 g64": {"scheme": "int2", "group_size": 64},
    "int8-dynamic": {"scheme": "int8-dynamic"},
    "int8-static": {"scheme": "int8-static", "sensitivity_samples": 0},
    "int4 g32, zero points": {"scheme": "int4", "group_size": 32, "symmetric": False},
    "int3 g64, zero points": {"scheme": "int3", "group_size": 64, "symmetric": False},
    "int2 g64, zero points": {"scheme": "int2", "group_size": 64, "symmetric": False},
}
GPTQ, AWQ, SMOOTH = {"method": "gptq"}, {"method": "awq"}, {"smoothquant_alpha": 0.5}
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "rtn, symmetric activations": {"activations_symmetric": True},
    "rtn, clip mse": {"clip": "mse"},
    "hqq": {"method": "hqq"},
    "awq, one-sided": AWQ | {"duo_scaling": False},
    "awq": AWQ,
    "gptq, in order": GPTQ | {"act_order": "none"},
    "gptq": GPTQ,
    "gptaq": GPTQ | {"gptaq_alpha": 0.25},
    "gptq, clip mse": GPTQ | {"clip": "mse"},
    "autoround": {"method": "autoround"},
    "smoothquant, norms": SMOOTH | {"smoothquant_targets": ["norms"]},
    "smoothquant": SMOOTH,
    "smoothquant, factors": SMOOTH | {"smoothquant_targets": ["norms", "layers", "factors"]},
    "rotated, rtn": {"rotate": {}},
    "rotated, gptq": GPTQ | {"rotate": {}},
    "rotation learned, rtn": {"rotate": {"learned": {}}},
    "rotation learned, gptq": GPTQ | {"rotate": {"learned": {}}},
    "values rotated, rtn": {"rotate": {"targets": ["heads"]}},
    "values rotated, gptq": GPTQ | {"rotate": {"targets": ["heads"]}},
    "rotation of values learned, rtn": {"rotate": {"targets": ["heads"], "learned": {}}},
    "rotation of values learned, gptq": GPTQ | {"rotate": {"targets": ["heads"], "learned": {}}},
}
# Methods of rounding_worker.py.
PEERS = ("llm-compressor gptq", "llm-compressor awq", "gptqmodel gptq")
PEER_FORMS = {
    "int8-dynamic": (8, -1), "int4 g128": (4, 128), "int4 g32": (4, 32), "int3 g64": (3, 64),
    "int2 g64": (2, 64),
}  # fmt: skip
# the first is compared with the second
PAIRS = (
    ("gptq", "gptq, in order"), ("awq", "awq, one-sided"), ("gptaq", "gptq"), ("gptq, clip mse", "gptq"),
    ("rtn", "rtn, symmetric activations"), ("rtn, clip mse", "rtn"), ("hqq", "rtn"), ("rtn, clip mse", "hqq"),
    ("autoround", "rtn"), ("autoround", "gptq"), ("autoround", "awq"), ("autoround", "rtn, clip mse"),
    ("rotated, rtn", "rtn"), ("rotated, gptq", "gptq"),
    ("rotation learned, rtn", "rotated, rtn"), ("rotation learned, gptq", "rotated, gptq"),
    ("rotation learned, rtn", "rtn"), ("rotation learned, gptq", "gptq"),
    ("rotation of values learned, rtn", "rtn"), ("rotation of values learned, gptq", "gptq"),
    ("smoothquant, norms", "rtn"), ("smoothquant", "smoothquant, norms"),
    ("smoothquant, factors", "smoothquant"), ("values rotated, rtn", "rtn"), ("values rotated, gptq", "gptq"),
)  # fmt: skip


Batches = list[dict[str, Tensor]]
Row = tuple[float, float, float, int]  # of a sample: see `measure`


def context_of(options: argparse.Namespace) -> Context:
    """Return a context with the splits."""

    def read(name: str) -> Split:
        split = read_split(str(options.data).format(name), options.task, Columns(), Path())
        return replace(split, windows=Windows(length=options.window)) if options.window else split

    return Context(
        out=options.out / "arm", task=options.task, data={name: read(name) for name in ("train", "test")},
        seed=0, ancestors={}, score=lambda *_: {}, threads=1, device="cpu",
    )  # fmt: skip


def test_batches(options: argparse.Namespace) -> Batches:
    """Return batches of the test set, each of equal lengths, with the float model's log-probabilities."""
    model, context = load_model(options.model)[0], context_of(options)
    processor = load_processor(options.model)
    samples = draw_samples(context.data["test"], model, processor, options.samples, context, "benchmark")
    batches = list(make_batches(samples, model.config))
    return [{"float": predict(model, batch), **batch} for batch in batches]


@torch.inference_mode()
def predict(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probabilities of tokens [B, S, V], or of the classes of texts [B, 1, V]."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "float")}
    logits: Tensor = model(**inputs, **({"use_cache": False} if model.can_generate() else {})).logits
    return (logits[:, None] if logits.dim() == 2 else logits).log_softmax(-1)


def measure(model: Any, batches: Batches) -> list[Row]:
    """Return the summed loss and divergence in nats, right predictions, and predictions of each sample."""
    rows: list[Row] = []
    for batch in batches:
        values, float_values = predict(model, batch), batch["float"]
        labels = batch["labels"].reshape(len(values), -1)  # of running text: the next tokens
        is_scored = labels != IGNORE_INDEX
        losses = F.nll_loss(values.mT, labels, reduction="none", ignore_index=IGNORE_INDEX)
        divergences = F.kl_div(values, float_values, reduction="none", log_target=True).sum(-1) * is_scored
        is_right = (values.argmax(-1) == labels) & is_scored
        sums = (part.sum(1).tolist() for part in (losses, divergences, is_right, is_scored))
        rows += zip(*sums, strict=True)
    return rows


def differences(rows: list[Row], base: list[Row]) -> str:
    """Return table cells: the mean differences of loss, divergence and percentage, with their intervals."""
    values, tokens = np.array(rows)[:, :3] - np.array(base)[:, :3], np.array(rows)[:, 3]
    values[:, 2] *= 100
    counts = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), 2000)
    limits = np.percentile((counts @ values) / (counts @ tokens)[:, None], (2.5, 97.5), axis=0)
    cells = zip(values.sum(axis=0) / tokens.sum(), *limits, (5, 5, 2), strict=True)
    return " | ".join(f"{m:+.{d}f} [{a:+.{d}f}, {b:+.{d}f}]" for m, a, b, d in cells)


def outside_blocks(model: Any) -> list[str]:
    """Return the names of the linear layers outside of blocks."""
    inside = {n for block in blocks_of(model) for part in block.parts for n in part.linear_layers}
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in inside]


def with_float_activations(model: Any) -> Any:
    """Return `model` with its quantized linear layers replaced by float ones with the same values."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = module.matrix.dequantize()
            linear.register_parameter("bias", module.bias)
            replace_module(model, name, linear)
    return model


def quantize_settings(settings: dict[str, Any]) -> QuantizeSettings | None:
    """Return the settings of `quantize`; None if it does not take them together."""
    try:
        return QuantizeSettings(**{name: value for name, value in settings.items() if name != "rotate"})
    except ValidationError:
        return None


def quantize_and_measure(
    settings: dict[str, Any], options: argparse.Namespace, batches: Batches
) -> dict[str, Any]:
    """Quantize the model, and return its rows, the bits per weight and the seconds that it took."""
    folder, start = options.out / "quantized", time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    data: dict[str, Any] = {"train": str(options.data).format("train")}
    if options.window:
        data["windows"] = {"length": options.window}
    settings, source = dict(settings), options.model
    checked = quantize_settings(settings)
    if options.calibration_samples and checked and checked.needs_calibration:
        settings["calibration_samples"] = options.calibration_samples
    if options.peers:
        outside = outside_blocks(load_model(options.model)[0])
        settings |= {"embeddings": False, "output_layer": False, "exclude": outside}
    common = {"data": data, "task": options.task, "threads": 1, "device": "cpu"}
    if (rotation := settings.pop("rotate", None)) is not None:
        source = options.out / "rotated"
        shutil.rmtree(source, ignore_errors=True)
        if "learned" in rotation:
            options_of_scheme = ("scheme", "group_size", "symmetric")
            learned = {name: settings[name] for name in options_of_scheme if name in settings}
            rotation = rotation | {"learned": learned}
        smelt.apply("rotate", options.model, out=source, **common, **rotation)
    artifact = smelt.apply("quantize", source, out=folder, **common, **settings)
    seconds, details = time.perf_counter() - start, artifact.manifest.details
    model, _ = load_model(folder)
    return {
        "rows": measure(with_float_activations(model) if options.peers else model, batches),
        "bits": details["bits_per_weight"],
        "seconds": round(seconds, 1),
    }


def make_with_peer(form: str, method: str, options: argparse.Namespace, batches: Batches) -> dict[str, Any]:
    """Let a peer quantize the model on the same tokens, and return what `quantize_and_measure` returns."""
    model, context = load_model(options.model)[0], context_of(options)
    wanted = options.calibration_samples
    source = Artifact(options.model, manifest=cast("Any", None))  # only its path is read
    samples = load_calibration_samples(model, source, wanted, context, "quantize", held_back=True)
    tokens = {f"{i} {name}": v for i, batch in enumerate(samples.batches) for name, v in batch.items()}
    files = [options.out / name for name in ("calibration.safetensors", "job.json", "peer.safetensors")]
    save_file({name: value.contiguous() for name, value in tokens.items()}, files[0])
    (bits, group_size), outside = PEER_FORMS[form], outside_blocks(model)
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in outside]
    job = {
        "model": str(options.model), "method": method, "bits": bits, "group_size": group_size,
        "architecture": type(model).__name__, "layers": layers,
        "blocks": sorted({type(block.module).__name__ for block in blocks_of(model)}),
    }  # fmt: skip
    files[1].write_text(json.dumps(job), encoding="utf-8")
    worker = Path(__file__).parent / "peer_systems" / "rounding_worker.py"
    done = subprocess.run([options.peers, worker, *files], check=False, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip() or "no output").splitlines()[-1]}
    model.load_state_dict(load_file(files[2]))
    width = float(np.mean([m.in_features for n, m in model.named_modules() if n in layers]))
    return {
        "rows": measure(model, batches),
        "bits": bits + 16 / (group_size if group_size > 0 else width),
        "seconds": float(done.stdout.splitlines()[-1]),
    }


def main(arguments: list[str]) -> int:
    """Run the arms that are missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", required=True, help="files of the splits, with {} for train and test")
    parser.add_argument("--task", default="translation")
    parser.add_argument("--window", type=int, help="tokens of a sample of running text")
    parser.add_argument("--samples", type=int, default=400, help="of test")
    parser.add_argument("--calibration-samples", type=int, help="default: that of quantize")
    parser.add_argument("--peers", type=Path, help="Python of an environment with llm-compressor, GPTQModel")
    parser.add_argument("--only", action="append", help="a pattern of FORM METHOD; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "losses.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    batches = test_batches(options)
    if "float" not in results:
        results["float"] = {"rows": measure(load_model(options.model)[0], batches), "bits": 32, "seconds": 0}
    arms: dict[str, Callable[[], dict[str, Any]]] = {}
    for form, codes in FORMS.items():
        for method, settings in METHODS.items():
            if quantize_settings(codes | settings):
                arms[f"{form}, {method}"] = partial(quantize_and_measure, codes | settings, options, batches)
        for peer in PEERS if options.peers and form in PEER_FORMS else ():
            arms[f"{form}, {peer}"] = partial(make_with_peer, form, peer, options, batches)
    for arm, make in arms.items():
        if arm in results or not any(fnmatch.fnmatch(arm, p) for p in options.only or ["*"]):
            continue
        results[arm] = make()
        file.write_text(json.dumps(results), encoding="utf-8")
        print(arm, results[arm].get("error") or differences(results[arm]["rows"], results["float"]["rows"]))
    print_tables(results)
    return 0


def print_tables(results: dict[str, Any]) -> None:
    """Print the arms against the float model and against the best peer, and pairs of arms."""
    rows = {arm: result["rows"] for arm, result in results.items() if "rows" in result}
    loss, _, right, tokens = np.array(rows["float"]).sum(axis=0)
    loss, right = loss / tokens, 100 * right / tokens
    print(f"\nfloat: loss {loss:.4f}, perplexity {np.exp(loss):.2f}, {right:.2f} %")
    print("\n| arm | bits | seconds | loss | divergence | right |\n|:--|--:|--:|--:|--:|--:|")
    for arm, result in results.items():
        cells = differences(rows[arm], rows["float"]) if arm in rows else result["error"]
        print(f"| {arm} | {result.get('bits', 0):.2f} | {result.get('seconds', 0):.0f} | {cells} |")
    print("\n| form | methods | loss | divergence | right |\n|:--|:--|--:|--:|--:|")
    for form in FORMS:
        peers = [arm for peer in PEERS if (arm := f"{form}, {peer}") in rows]
        best = min(peers, key=lambda arm: sum(row[1] for row in rows[arm]), default=None)
        pairs = [(f"{form}, {new}", f"{form}, {old}") for new, old in PAIRS]
        for new, old in pairs + [(f"{form}, {method}", best) for method in METHODS if best]:
            if new in rows and old in rows:
                names = " − ".join(arm.removeprefix(f"{form}, ") for arm in (new, old))
                print(f"| {form} | {names} | {differences(rows[new], rows[old])} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
