"""smelt's search beside Olive's: one fine-tuned BERT for SST-2, the same goal, the same time.

    python -m venv build/olive && build/olive/bin/pip install torch==2.13.0 olive-ai==0.13.0 \\
        onnxruntime==1.32.0 requests
    python benchmarks/search_peers.py runs/minilm-sst2/artifacts/tuned --data ../shared/data/sst2 \\
        --olive build/olive/bin/python --minutes 10 --out runs/search-peers

Both minimize the latency of one text, with at most one point of accuracy lost on validation, without
training: the scheme and its options, in smelt also pruning. Each has the machine's time for itself, one after
the other. Then both winners and Olive's float graph label the test texts in alternating rounds, from text to
label, with one thread. Olive 0.13.0 needs two workarounds, which are marked.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_NAMES = ["input_ids", "attention_mask", "token_type_ids"]
_RECIPE = """\
model: {model}
task: text-classification
threads: 1
data: {{train: {data}/train.jsonl.gz, validation: {data}/validation.jsonl.gz, test: {data}/test.jsonl.gz}}
stages:
  - prune: {{targets: [ffn], keep_ratio: {{search: [0.5, 0.95]}}}}
    optional: search
  - quantize: {{scheme: {{search: {{choices: [int8-dynamic, int8-static, int4]}}}}}}
  - onnx: {{target: ort-cpu, autotune: {{search: {{choices: [true, false]}}}}}}
score: {{quality: [accuracy], latency: {{batch_sizes: [1]}}}}
search: {{minimize: latency}}
gates: {{accuracy: {{max_degradation: 1.0}}}}
"""


def _olive_search(job: dict[str, Any]) -> None:
    """Run in Olive's environment: convert, then search the options of its quantization."""
    import torch
    from olive.common import config_utils
    from olive.data.component.dataset import BaseDataset
    from olive.data.registry import Registry
    from olive.workflows import run

    # workaround: an evaluator without a type is an error in 0.13.0
    enum: Any = config_utils.CaseInsensitiveEnum
    lower = enum._missing_.__func__
    enum._missing_ = classmethod(lambda cls, value: None if value is None else lower(cls, value))

    def register(name: str, rows: list[Any], length: int) -> dict[str, Any]:
        def load(data_dir: Any = None, **_: Any) -> Any:
            samples = []
            for row, label in rows:
                ids = torch.tensor(row)
                mask = torch.ones_like(ids)
                if length:  # ONNX Runtime's calibrators need samples of one length
                    pad = (0, max(0, length - len(row)))
                    ids, mask = (torch.nn.functional.pad(x[:length], pad) for x in (ids, mask))
                samples.append((dict(zip(_NAMES, (ids, mask, torch.zeros_like(ids)), strict=True)), label))
            return BaseDataset(samples)

        Registry.register_dataset(name)(load)
        done = {"post_process_data_config": {"type": "text_classification_post_process"}}
        return {"name": name, "type": "DataContainer", "load_dataset_config": {"type": name}} | done

    rows = [register("held_rows", job["validation"], 0), register("few_rows", job["calibration"], 64)]
    shapes = {"input_shapes": [[1, 128]] * 3, "input_types": ["int64"] * 3}
    axes = {"dynamic_axes": {name: {"0": "batch", "1": "length"} for name in _NAMES}}
    one_thread = {"session_options": {"intra_op_num_threads": 1, "inter_op_num_threads": 1}}
    accelerator = {"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}
    common = {
        "data_configs": rows,
        "systems": {"local": {"type": "LocalSystem", "accelerators": [accelerator]}},
        "target": "local",
        "cache_dir": f"{job['out']}/cache",
    }
    began = time.monotonic()
    io = {"input_names": _NAMES, "output_names": ["logits"], **shapes, **axes}
    task = {"task": "text-classification", "io_config": io}
    run(
        common
        | {
            "input_model": {"type": "HfModel", "model_path": job["model"], **task},
            "passes": {
                "conversion": {"type": "OnnxConversion", "target_opset": 20},
                "transformer": {"type": "OrtTransformersOptimization", "model_type": "bert"},
            },
            "output_dir": f"{job['out']}/fp32",
        }
    )
    # workaround: in one workflow every point that takes the conversion from the cache fails in 0.13.0
    (graph,) = Path(job["out"], "fp32").rglob("*.onnx")
    goal = {"type": "max-degradation", "value": 0.01}
    latency: dict[str, Any] = {"name": "latency", "type": "latency", "data_config": "held_rows"}
    latency |= {"sub_types": [{"name": "avg", "priority": 1}]}
    latency |= {"user_config": {"inference_settings": {"onnx": one_thread}}}
    accuracy: dict[str, Any] = {"name": "accuracy", "type": "accuracy", "data_config": "held_rows"}
    accuracy |= {"sub_types": [{"name": "accuracy_score", "priority": 2, "goal": goal}]}
    searched = ("quant_mode", "precision", "per_channel", "reduce_range", "quant_format", "calibrate_method")
    strategy = {"execution_order": "joint", "sampler": "tpe", "seed": 0, "max_samples": 200}
    run(
        common
        | {
            "input_model": {"type": "OnnxModel", "model_path": str(graph)},
            "evaluators": {"both": {"metrics": [latency, accuracy]}},
            "evaluator": "both",
            "search_strategy": strategy | {"max_time": int(job["seconds"] - (time.monotonic() - began))},
            "passes": {
                "quantization": {"type": "OnnxQuantization", "data_config": "few_rows"}
                | dict.fromkeys(searched, "SEARCHABLE_VALUES")
            },
            "output_dir": f"{job['out']}/best",
        }
    )


def _read_rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _graph_labels(graph: Path, tokenizer: Any) -> Callable[[str], int]:
    """Return a function from text to class, with ONNX Runtime alone."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def label(text: str) -> int:
        ids = np.array([tokenizer.encode(text).ids])
        values = (ids, np.ones_like(ids), np.zeros_like(ids))
        (logits,) = session.run(None, dict(zip(_NAMES, values, strict=True)))
        return int(logits[0].argmax())

    return label


def _rounds(systems: dict[str, Callable[[str], int]], texts: list[str], count: int) -> dict[str, list[float]]:
    """Return the processor time per text, ms, of each system in each of `count` alternating rounds."""
    times_ms: dict[str, list[float]] = {name: [] for name in systems}
    for round_index in range(count + 1):
        for name, label in systems.items():
            began = time.process_time()
            for text in texts:
                label(text)
            if round_index:  # the first round warms up
                times_ms[name].append(1000 * (time.process_time() - began) / len(texts))
    return times_ms


def _compare(out: Path, data: Path, model: Path) -> None:
    from tokenizers import Tokenizer

    import smelt
    from smelt.evaluate.quality import score_labels
    from smelt.evaluate.significance import compare_steps

    report = json.loads((out / "smelt" / "search.json").read_text(encoding="utf-8"))
    if not report["front"]:
        raise SystemExit("smelt's search found no point that meets the constraint")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    loaded = smelt.load(out / "smelt" / report["front"][0]["artifact"], threads=1)
    names = list(loaded.config["id2label"].values())
    (float_graph,) = (out / "olive" / "fp32").rglob("*.onnx")
    (best_graph,) = (out / "olive" / "best").rglob("*.onnx")
    systems: dict[str, Callable[[str], int]] = {
        "float": _graph_labels(float_graph, tokenizer),
        "olive": _graph_labels(best_graph, tokenizer),
        "smelt": lambda text: names.index(loaded.predict([text])[0].label),
    }
    rows = _read_rows(data / "test.jsonl.gz")
    gold = [int(row["label"]) for row in rows]
    scores = {
        name: score_labels(["accuracy"], [label(row["text"]) for row in rows], gold)["accuracy"]
        for name, label in systems.items()
    }
    times = _rounds(systems, [row["text"] for row in rows[:64]], 15)
    pairs = [a / b for a, b in zip(times["olive"], times["smelt"], strict=True)]
    print(
        f"smelt: {statistics.median(pairs):.2f} [{min(pairs):.2f}, {max(pairs):.2f}] times as fast as olive"
    )
    for name, score in scores.items():
        ratios = [a / b for a, b in zip(times["float"], times[name], strict=True)]
        other = compare_steps(score.statistics, scores["float"].statistics)
        print(
            f"{name}: {statistics.median(times[name]):.2f} ms of processor time;"
            f" {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] times as fast as float;"
            f" accuracy {score.value:.2f}, n = {score.n}, difference {other['difference']:+.2f}"
            f" {other['ci95']}, p = {other['p_value']:.2f}"
        )


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--data", required=True, type=click.Path(path_type=Path, exists=True), help="Folder of SST-2.")
@click.option("--olive", required=True, help="Python of an environment with olive-ai.")
@click.option("--minutes", default=10.0, show_default=True, help="Time of each search.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the results.")
def main(model: Path, data: Path, olive: str, minutes: float, out: Path) -> None:
    """Search with both, then compare the winners. What is in the folder already is not done again."""
    from tokenizers import Tokenizer

    model, data, out = model.resolve(), data.resolve(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OLIVE_DISABLE_TELEMETRY": "1"}
    if not (out / "smelt" / "search.json").exists():
        recipe = out / "search.yaml"
        recipe.write_text(_RECIPE.format(model=model, data=data), encoding="utf-8")
        words = ["search", str(recipe), "--time-limit", f"{60 * minutes:g}s", "--out", str(out / "smelt")]
        subprocess.run([sys.executable, "-m", "smelt", *words], check=False, env=environment)
    if not (out / "olive" / "best").exists():
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_padding()
        parts = {"validation": _read_rows(data / "validation.jsonl.gz")}
        parts["calibration"] = _read_rows(data / "train.jsonl.gz")[:32]
        rows = {n: [[tokenizer.encode(r["text"]).ids, r["label"]] for r in part] for n, part in parts.items()}
        job = {"model": str(model), "seconds": 60 * minutes, "out": str(out / "olive"), **rows}
        (out / "job.json").write_text(json.dumps(job), encoding="utf-8")
        subprocess.run([olive, __file__, str(out / "job.json")], check=True, env=environment)
    _compare(out, data, model)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        _olive_search(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
