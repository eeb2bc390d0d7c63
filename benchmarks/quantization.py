"""Every scheme of `quantize` on four models: quality, bytes and the time of the artifact.

    python benchmarks/quantization.py --task translation --out runs/quantization
    python benchmarks/quantization.py --task classification --model runs/sst2-small/artifacts/tuned
    python benchmarks/quantization.py --task translation --only fp32 --only "int3*"
    python benchmarks/quantization.py --time --task translation           # afterwards, on a quiet machine
    python benchmarks/quantization.py --table --out runs/quantization     # what is there, as tables

Writes one recipe for each task, a branch for each arm (quantize, then `onnx` for the arm's runtime), and lets
`smelt run` do it: what is done already is taken from its store. The baseline is the graph in float32 on ONNX
Runtime, and quality is tested against it in pairs. Times are taken apart from that, by `smelt bench` and side
by side: in each runtime one artifact of each form that codes run in, against float32 in the same runtime. The
tables of docs/measurements/quantization.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from smelt.pipeline.recipe.yaml_file import dump_yaml

BENCHMARKS = Path(__file__).parent
SHARED = BENCHMARKS.parent.parent / "shared"
BATCHES = [1, 8, 32]
# the model each task has where --model names none; the others come from the recipe named beside
TASKS: dict[str, dict[str, Any]] = {
    "translation": {
        "task": "translation", "data": "multi30k_en_de/{}.jsonl.gz", "metric": "bleu",
        "model": SHARED / "models/marian-small-en-de",
        "score": {"quality": ["bleu"], "generation": {"num_beams": 1, "max_new_tokens": 128}},
        "training": {"max_tokens_per_batch": 2500, "learning_rate": 1.0e-3},
    },
    "classification": {
        "task": "text-classification", "data": "sst2/{}.jsonl.gz", "metric": "accuracy",
        "from": "sst2-small.yaml, step tuned",
        "score": {"quality": ["accuracy"]},
        "training": {"batch_size": 32, "learning_rate": 2.0e-4},
    },
    "language-modeling": {
        "task": "language-modeling", "data": "wikitext2/{}.txt.gz", "metric": "perplexity",
        "from": "wikitext2-small.yaml, step trained", "windows": {"length": 256},
        "score": {"quality": ["perplexity"]},
        "training": {"max_tokens_per_batch": 4096, "learning_rate": 5.0e-4},
    },
    "summarization": {
        "task": "summarization", "data": "dialogsum/{}.jsonl.gz", "metric": "rougeL",
        "from": "bart-dialogsum.yaml, step trained",
        "score": {"quality": ["rougeL"], "generation": {"num_beams": 1, "max_new_tokens": 96}},
        "training": {"max_tokens_per_batch": 4000, "learning_rate": 5.0e-4},
    },
}  # fmt: skip
# three bits in the vocabulary too, where int4 is what stands there unless said
ALL_INT3 = {"scheme": "int3", "embedding_scheme": "int3"}
ARMS: dict[str, dict[str, Any]] = {
    "int8-dynamic": {"scheme": "int8-dynamic"},
    "int8-groupwise": {"scheme": "int8-groupwise"},
    "int8-static": {"scheme": "int8-static"},
    **{
        f"{codes['scheme']} {method}": codes | {"method": method, "group_size": 64}
        for codes in ({"scheme": "int4"}, ALL_INT3, {"scheme": "int2"})
        for method in ("rtn", "gptq", "awq", "awq-gptq", "hqq")
    },
    # as AWQ's published code runs it, and rtn on the same grid
    **{
        f"{codes['scheme']} {method}, zero points": codes | {"symmetric": False, "group_size": 64} | more
        for codes in ({"scheme": "int4"}, ALL_INT3, {"scheme": "int2"})
        for method, more in {"rtn": {}, "awq clip": {"method": "awq", "clip": "awq"}}.items()
    },
    "int3 gptq v4": {"scheme": "int3", "method": "gptq", "group_size": 64},
    # as many bits as the mixed ones beside them
    "int4 gptq g32": {"scheme": "int4", "method": "gptq", "group_size": 32},
    "int3 gptq g32": ALL_INT3 | {"method": "gptq", "group_size": 32},
    "mixed 4.5 gptq": {"mixed_precision": {"target_bits": 4.5}, "method": "gptq"},
    "mixed 3.5 gptq": {"mixed_precision": {"target_bits": 3.5}, "method": "gptq"},
    "kmeans4": {"scheme": "kmeans4"},
    "pow2": {"scheme": "pow2", "group_size": 64},
    "ternary gptq": {"scheme": "ternary", "method": "gptq", "group_size": 64},
    "binary rtn": {"scheme": "binary", "group_size": 64},
    "binary gptq": {"scheme": "binary", "method": "gptq", "group_size": 64},
    "bnb-nf4": {"scheme": "bnb-nf4", "embedding_scheme": "bnb-nf4"},
}
# trained through their codes; `fp32 trained` is the control with as many updates
TRAINED: dict[str, dict[str, Any] | None] = {
    "fp32 trained": None,
    "int3 trained": ALL_INT3,
    **{f"{scheme} trained": {"scheme": scheme} for scheme in ("int2", "ternary", "binary")},
}
OPENVINO = ("fp32", "int8-static", "int8-groupwise", "int4 rtn")
RUNTIMES = {"ONNX Runtime": "-ort-cpu", "OpenVINO": "-openvino", "torch": ""}
# one of each form: how codes are chosen changes no time, but few bits that are not trained write on and on,
# where the length of what is written is not given
LOW_BIT_SCHEMES = ("int3", "int2", "ternary", "binary")
TIMED_UNTRAINED = (
    "fp32", "int8-dynamic", "int8-groupwise", "int8-static", "int4 rtn", "kmeans4", "pow2", "bnb-nf4",
)  # fmt: skip
TIMED = (*TIMED_UNTRAINED, *(f"{scheme} {how}" for how in ("gptq", "trained") for scheme in LOW_BIT_SCHEMES))


def step_of(arm: str) -> str:
    """Return the name that an arm's step has in the recipe."""
    return arm.replace(" ", "-").replace(".", "").replace(",", "")


def stages_of(arm: str, training: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what makes an arm of the model; its last step has the arm's name."""
    if arm not in TRAINED:
        return [{"quantize": ARMS[arm], "name": step_of(arm), "from": "model"}]
    distill = {"distill": {"teacher": "model"} | training, "name": step_of(arm)}
    codes = TRAINED[arm]
    if codes is None:
        return [distill | {"from": "model"}]
    return [
        {"quantize": codes | {"group_size": 64}, "name": f"{step_of(arm)}-codes", "from": "model"},
        distill,
    ]


def recipe_of(name: str, model: Path, arms: list[str], updates: int, seed: int = 0) -> dict[str, Any]:
    """Return the recipe of one task: the float graphs, then for each arm its codes and its graphs."""
    task = TASKS[name]
    training = {"max_steps": updates, "num_evals": 0, "losses": {"logits": 1.0, "labels": 0.0}} | task[
        "training"
    ]
    stages: list[dict[str, Any]] = []
    for arm in ("fp32", *arms):
        stages += [] if arm == "fp32" else stages_of(arm, training)
        for target in ("ort-cpu", "openvino") if arm in OPENVINO else ("ort-cpu",):
            stages.append({
                "onnx": {"target": target}, "name": f"{step_of(arm)}-{target}",
                "from": "model" if arm == "fp32" else step_of(arm), "optional": target == "openvino",
            })  # fmt: skip
    data: dict[str, Any] = {split: str(data_of(name, split)) for split in ("train", "validation", "test")}
    if "windows" in task:
        data["windows"] = task["windows"]
    score = task["score"] | {"latency": False}
    return {
        "model": str(model.resolve()), "task": task["task"], "threads": 1, "seed": seed, "data": data,
        "stages": stages, "baseline": "fp32-ort-cpu", "score": score,
    }  # fmt: skip


def selected_arms(only: list[str] | None) -> list[str]:
    """Return the arms that the command line asks for, fp32 apart."""
    return [
        arm for arm in (*ARMS, *TRAINED) if not only or any(fnmatch.fnmatch(arm, pattern) for pattern in only)
    ]


def run(name: str, model: Path, arms: list[str], updates: int, seed: int, out: Path) -> int:
    """Write the recipe of one task to out/NAME.yaml and run it; return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    recipe = out / f"{name}.yaml"
    recipe.write_text(dump_yaml(recipe_of(name, model, arms, updates, seed)), encoding="utf-8")
    command = [sys.executable, "-m", "smelt", "run", str(recipe), "--out", str(out / name)]
    return subprocess.run(command, check=False).returncode


def data_of(name: str, split: str) -> Path:
    """Return the file of one split of a task's rows."""
    return SHARED / "data" / str(TASKS[name]["data"]).format(split)


def time_artifacts(name: str, out: Path) -> int:
    """Time the artifacts of one task's run in each runtime, into out/NAME/latency.json; return the status."""
    latencies: dict[str, Any] = {}
    folder = out / name / "artifacts"
    for runtime, ending in RUNTIMES.items():
        how = "gptq" if name == "language-modeling" else "trained"
        arms = (*TIMED_UNTRAINED, *(f"{scheme} {how}" for scheme in LOW_BIT_SCHEMES))
        names = {arm: f"{step_of(arm)}{ending}" for arm in arms} | ({} if ending else {"fp32": "model"})
        there = {arm: folder / step for arm, step in names.items() if (folder / step).is_dir()}
        if len(there) < 2 or "fp32" not in there:
            continue
        command = [sys.executable, "-m", "smelt", "bench", *map(str, there.values()), "--json"]
        command += ["--data", str(data_of(name, "test")), "--threads", "1", "--texts", "32"]
        command += [argument for size in BATCHES for argument in ("--batch-size", str(size))]
        completed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if completed.returncode:
            return completed.returncode
        measured = json.loads(completed.stdout)["artifacts"]
        latencies[runtime] = {arm: measured[path.name] for arm, path in there.items()}
        (out / name / "latency.json").write_text(json.dumps(latencies, indent=1), encoding="utf-8")
    return 0


def quality_table(report: dict[str, Any], metric: str) -> list[str]:
    """Return the lines of one task's table of quality, an arm a row."""
    steps = {step["name"]: step for step in report["steps"] if step["status"] in ("done", "cached")}
    lines = [f"| arm | bits | MB | {metric} | against fp32 |", "|:--|--:|--:|--:|--:|"]
    for arm in ("fp32", *ARMS, *TRAINED):
        model = steps.get("model" if arm == "fp32" else step_of(arm))
        for target, label in (("ort-cpu", arm), ("openvino", f"{arm}, OpenVINO")):
            if model and (graph := steps.get(f"{step_of(arm)}-{target}")):
                cells = [
                    label,
                    _bits_cell(steps.get(f"{step_of(arm)}-codes", model)),
                    f"{graph['size_bytes'] / 1e6:.2f}",
                    *_quality_cells(graph, metric),
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def latency_table(latencies: dict[str, Any]) -> list[str]:
    """Return the lines of one task's table of times: milliseconds a call, and against float32."""
    heads = [f"{runtime}, {size}" for runtime in latencies for size in BATCHES]
    lines = ["| arm | " + " | ".join(heads) + " |", "|:--" + "|--:" * len(heads) + "|"]
    for arm in TIMED:
        if any(arm in of for of in latencies.values()):
            cells = [_time_cell(of.get(arm), size) for of in latencies.values() for size in BATCHES]
            lines.append("| " + " | ".join([arm, *cells]) + " |")
    return lines


def _bits_cell(step: dict[str, Any]) -> str:
    bits = (step.get("details") or {}).get("bits_per_weight")
    return "32" if bits is None else f"{bits:.2f}"


def _quality_cells(step: dict[str, Any], metric: str) -> tuple[str, str]:
    value, test = step["quality"][metric], (step["against_baseline"] or {}).get(metric)
    text = "{:.2f}".format(value["value"]) + _interval_text(value["ci95"], "")
    if not test:
        return text, "–"
    difference = "{:+.2f}".format(test["difference"]) + _interval_text(test["ci95"], "+")
    return text, f"{difference}, p = {test['p_value']:.3f}"


def _interval_text(interval: list[float] | None, sign: str) -> str:
    return " [{:{sign}.2f}, {:{sign}.2f}]".format(*interval, sign=sign) if interval else ""


def _time_cell(artifact: dict[str, Any] | None, size: int) -> str:
    rows = (artifact or {}).get("latency") or ()
    row = next((row for row in rows if row["batch_size"] == size), None)
    if row is None:
        return ""
    text = f"{row['p50_ms']:.3g} ms{'' if row['stable'] else ' (unstable)'}"
    if row["speedup_ci95"] == [1.0, 1.0]:
        return text
    return "{}, {:.2f} [{:.2f}, {:.2f}]".format(text, row["speedup"], *row["speedup_ci95"])


def main(arguments: list[str]) -> int:
    """Run one task's recipe, time what it made, or print the tables of the tasks that were run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS))
    parser.add_argument("--model", type=Path, help="a trained model's folder")
    parser.add_argument("--only", action="append", help="a pattern of arms; may be repeated")
    parser.add_argument("--updates", type=int, default=300, help="of the arms that are trained")
    parser.add_argument("--seed", type=int, default=0, help="another one needs an --out of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/quantization"))
    parser.add_argument("--time", action="store_true", help="only time what a run has made")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        for name, task in TASKS.items():
            report, latency = (options.out / name / file for file in ("report.json", "latency.json"))
            if report.is_file():
                print(f"\n{name}\n")
                print(
                    *quality_table(json.loads(report.read_text(encoding="utf-8")), task["metric"]), sep="\n"
                )
            if latency.is_file():
                print("", *latency_table(json.loads(latency.read_text(encoding="utf-8"))), sep="\n")
        return 0
    if options.task is None:
        parser.error("--task or --table")
    if options.time:
        return time_artifacts(options.task, options.out)
    model = options.model or TASKS[options.task].get("model")
    if model is None or not model.is_dir():
        parser.error(
            f"--model: {options.task} needs a trained model"
            f" (benchmarks/recipes/{TASKS[options.task]['from']})"
        )
    return run(options.task, model, selected_arms(options.only), options.updates, options.seed, options.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
