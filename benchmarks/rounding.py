"""Ways to choose quantized weights, compared on held-out samples: loss and divergence, in pairs.

    python benchmarks/rounding.py --model ../shared/models/marian-small-en-de \
        --data ../shared/data/multi30k_en_de/{}.jsonl.gz --out runs/rounding/marian
    python benchmarks/rounding.py --model runs/llama/artifacts/trained --task language-modeling \
        --data ../shared/data/wikitext2/{}.txt.gz --window 128 --out runs/rounding/llama

Every arm quantizes the same model on the same calibration samples, drawn from `train`. The torch artifact is
compared with the float model on `test`, in nats per token: by its loss, and by the Kullback-Leibler
divergence of its predictions from the float model's. Brackets are 95 % intervals of the mean difference, by a
bootstrap over samples. Results are stored in OUT/losses.json; arms that are there are not run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import smelt
from smelt.calibration.samples import draw_samples, make_batches
from smelt.data.splits import Columns, Windows
from smelt.models.checkpoint import load_model
from smelt.stage import Context
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import IGNORE_INDEX, load_processor

FORMS: dict[str, dict[str, Any]] = {
    "int4 g128": {"scheme": "int4", "group_size": 128},
    "int4 g32": {"scheme": "int4", "group_size": 32},
    "int3 g64": {"scheme": "int3", "group_size": 64},
    "int2 g64": {"scheme": "int2", "group_size": 64},
    "int8-dynamic": {"scheme": "int8-dynamic"},
    "int8-static": {"scheme": "int8-static"},
    "int4 g32, zero points": {"scheme": "int4", "group_size": 32, "symmetric": False},
    "int3 g64, zero points": {"scheme": "int3", "group_size": 64, "symmetric": False},
    "int2 g64, zero points": {"scheme": "int2", "group_size": 64, "symmetric": False},
}
GPTQ, AWQ = {"method": "gptq"}, {"method": "awq"}
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "rtn, clip mse": {"clip": "mse"},
    "hqq": {"method": "hqq"},
    "awq, one-sided": AWQ | {"duo_scaling": False},
    "awq": AWQ,
    "gptq, in order": GPTQ | {"act_order": "none"},
    "gptq": GPTQ,
    "gptaq": GPTQ | {"gptaq_alpha": 0.25},
    "gptq, clip mse": GPTQ | {"clip": "mse"},
    "autoround": {"method": "autoround"},
    "rotated, rtn": {"rotate": {}},
    "rotated, gptq": GPTQ | {"rotate": {}},
    "values rotated, rtn": {"rotate": {"targets": ["heads"]}},
    "values rotated, gptq": GPTQ | {"rotate": {"targets": ["heads"]}},
}
# the first is compared with the second
PAIRS = (
    ("gptq", "gptq, in order"), ("awq", "awq, one-sided"), ("gptaq", "gptq"), ("gptq, clip mse", "gptq"),
    ("rtn, clip mse", "rtn"), ("hqq", "rtn"), ("rtn, clip mse", "hqq"),
    ("autoround", "rtn"), ("autoround", "gptq"), ("autoround", "awq"), ("autoround", "rtn, clip mse"),
    ("rotated, rtn", "rtn"), ("rotated, gptq", "gptq"),
    ("values rotated, rtn", "rtn"), ("values rotated, gptq", "gptq"),
)  # fmt: skip


@torch.inference_mode()
def measure(folder: Path, options: argparse.Namespace) -> list[tuple[float, float, int]]:
    """Return the summed loss and divergence in nats, and the number of predicted tokens, of each sample."""
    (model, _), (float_model, _) = load_model(folder), load_model(options.model)
    split = read_split(str(options.data).format("test"), options.task, Columns(), Path())
    if options.window:
        split = replace(split, windows=Windows(length=options.window))
    context = Context(
        out=options.out, task=options.task, data={"test": split}, seed=0, ancestors={}, score=lambda *_: {},
        threads=1, device="cpu",
    )  # fmt: skip
    samples = draw_samples(split, model, load_processor(folder), options.samples, context, "benchmark")
    rows = []
    for sample in samples:
        (batch,) = make_batches([sample], model.config)
        labels = batch.pop("labels")
        logits, float_logits = (m(**batch, use_cache=False).logits for m in (model, float_model))
        if "decoder_input_ids" not in batch:
            logits, float_logits, labels = logits[:, :-1], float_logits[:, :-1], labels[:, 1:]
        log_probabilities, float_log_probabilities = (
            values.log_softmax(-1)[labels != IGNORE_INDEX] for values in (logits, float_logits)
        )
        loss = F.nll_loss(log_probabilities, labels[labels != IGNORE_INDEX], reduction="sum")
        divergence = F.kl_div(log_probabilities, float_log_probabilities, reduction="sum", log_target=True)
        rows.append((float(loss), float(divergence), len(log_probabilities)))
    return rows


def differences(rows: list[list[float]], base: list[list[float]]) -> str:
    """Return table cells: the mean differences of loss and divergence, with their intervals."""
    values, tokens = np.array(rows)[:, :2] - np.array(base)[:, :2], np.array(rows)[:, 2]
    counts = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), 2000)
    limits = np.percentile((counts @ values) / (counts @ tokens)[:, None], (2.5, 97.5), axis=0)
    means = values.sum(axis=0) / tokens.sum()
    return " | ".join(f"{m:+.4f} [{a:+.4f}, {b:+.4f}]" for m, a, b in zip(means, *limits, strict=True))


def quantize_and_measure(settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Quantize the model, and return the losses, the bits per weight and the seconds that it took."""
    folder, start = options.out / "quantized", time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    data: dict[str, Any] = {"train": str(options.data).format("train")}
    if options.window:
        data["windows"] = {"length": options.window}
    is_calibrated = settings.get("method") in ("gptq", "awq", "autoround")
    is_calibrated |= settings["scheme"] == "int8-static"
    calibrated = {"calibration_samples": options.calibration_samples} if is_calibrated else {}
    common = {"data": data, "task": options.task, "threads": 1, "device": "cpu"}
    quantize_settings, source = settings | calibrated, options.model
    if (rotation := quantize_settings.pop("rotate", None)) is not None:
        source = options.out / "rotated"
        shutil.rmtree(source, ignore_errors=True)
        smelt.apply("rotate", options.model, out=source, **common, **rotation)
    artifact = smelt.apply("quantize", source, out=folder, **common, **quantize_settings)
    seconds, details = time.perf_counter() - start, artifact.manifest.details
    return {
        "rows": measure(folder, options),
        "bits": details["bits_per_weight"],
        "seconds": round(seconds, 1),
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
    parser.add_argument("--calibration-samples", type=int, default=1024)
    parser.add_argument("--only", action="append", help="a pattern of FORM METHOD; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "losses.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "float" not in results:
        results["float"] = {"rows": measure(options.model, options), "bits": 32, "seconds": 0}
    for form, codes in FORMS.items():
        for method, settings in METHODS.items():
            arm = f"{form}, {method}"
            if arm in results or not any(fnmatch.fnmatch(arm, p) for p in options.only or ["*"]):
                continue
            results[arm] = quantize_and_measure(codes | settings, options)
            file.write_text(json.dumps(results), encoding="utf-8")
            print(arm, differences(results[arm]["rows"], results["float"]["rows"]), flush=True)
    print("\n| arm | bits | seconds | loss | divergence |\n|:--|--:|--:|--:|--:|")
    for arm, result in results.items():
        cells = differences(result["rows"], results["float"]["rows"])
        print(f"| {arm} | {result['bits']:.2f} | {result['seconds']} | {cells} |")
    print("\n| form | methods | loss | divergence |\n|:--|:--|--:|--:|")
    for form in FORMS:
        for new, old in PAIRS:
            arms = f"{form}, {new}", f"{form}, {old}"
            if all(arm in results for arm in arms):
                print(f"| {form} | {new} − {old} | {differences(*(results[arm]['rows'] for arm in arms))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
