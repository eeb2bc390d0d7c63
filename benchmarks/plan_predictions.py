"""The predictions of `smelt plan` against measurements: time, memory and disk of steps and scores.

    python benchmarks/plan_predictions.py --shared ../shared --minilm FOLDER [--space FOLDER] [CASE ...]

Each case is a recipe of one thread. `smelt plan` predicts it with an empty store; then a process of its own
runs it. Time is the processor seconds of the measured step, which another load on the machine changes less
than the time that passes; memory is the peak of the resident set. Prints a table, and writes `results.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LLAMAS: dict[str, dict[str, int]] = {  # random; the large one in bfloat16, the small one in float32
    "llama-537m": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10},
    "llama-127m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
}
VOCABULARY = 32000
SPLITS = ("train", "validation", "test")
# Lines of the test data that are scored.
LINES = {"multi30k": 300, "wikitext": 300}
Case = tuple[dict[str, Any], str]


def write_llama(folder: Path, name: str, text: Path) -> None:
    """Write a random Llama with a tokenizer that is trained on the lines of `text`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    config = transformers.LlamaConfig(
        **LLAMAS[name], num_attention_heads=16, num_key_value_heads=8, vocab_size=VOCABULARY,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "llama-537m" else torch.float32
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"])
        tokenizer.train_from_iterator(lines, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def data_files(shared: Path, space: Path) -> dict[str, dict[str, str]]:
    """Return the files of each data set; the test data of some are cut to `LINES`."""
    folders = {"multi30k": "multi30k_en_de", "sst2": "sst2", "wikitext": "wikitext2"}
    found = {}
    for name, folder in folders.items():
        ending = "txt" if name == "wikitext" else "jsonl"
        files = {split: shared / "data" / folder / f"{split}.{ending}.gz" for split in SPLITS}
        if name in LINES:
            cut = space / f"{name}-test.{ending}"
            with gzip.open(files["test"], "rt", encoding="utf-8") as lines:
                cut.write_text("".join([line for line, _ in zip(lines, range(LINES[name]), strict=False)]))
            files["test"] = cut
        found[name] = {split: str(path) for split, path in files.items()}
    return found


def cases(shared: Path, minilm: Path, space: Path) -> dict[str, Case]:
    """Return the recipe and the measured step of each case; `NAME, scoring` measures the scores of NAME."""
    data = data_files(shared, space)
    wikitext = data["wikitext"]
    text = {"train": wikitext["validation"], "test": wikitext["test"], "windows": {"length": 256}}
    marian = {
        "model": str(shared / "models" / "marian-small-en-de"),
        "task": "translation",
        "data": data["multi30k"],
    }
    classifier = {"model": str(minilm), "task": "text-classification", "data": data["sst2"]}
    large, small = (
        {"model": str(space / name), "task": "language-modeling", "data": text} for name in LLAMAS
    )
    training = {"max_steps": 30, "num_evals": 1, "max_validation_samples": 200, "precision": "fp32"}
    few = {"calibration_samples": 8}
    distill = {"student": {"decoder_layers": 1}, "max_tokens_per_batch": 2500, **training}
    qat = [{"quantize": {"scheme": "int8-dynamic"}}, {"finetune": {"batch_size": 32, **training}}]
    beams = {"quality": ["bleu"], "generation": {"num_beams": 4}}
    return {
        "finetune": (marian | {"stages": [{"finetune": {"batch_size": 64, **training}}]}, "finetune"),
        "distill": (marian | {"stages": [{"distill": distill}]}, "distill"),
        "qat": (classifier | {"stages": qat}, "finetune"),
        "rtn": (large | {"stages": [{"quantize": {"scheme": "int4"}}]}, "quantize"),
        "gptq": (large | {"stages": [{"quantize": {"scheme": "int4", "method": "gptq", **few}}]}, "quantize"),
        "prune": (small | {"stages": [{"prune": {"keep_ratio": 0.5, **few}}]}, "prune"),
        "factorize": (small | {"stages": [{"factorize": {"keep_ratio": 0.5, **few}}]}, "factorize"),
        "onnx": (small | {"stages": [{"onnx": {}}]}, "onnx"),
        "generation": (marian | {"stages": [], "score": beams}, "model, scoring"),
        "perplexity": (small | {"stages": []}, "model, scoring"),
    }


def measure(recipe: Path, step: str, out: Path) -> dict[str, float]:
    """Run the recipe in this process; return seconds, memory and disk of `step`."""
    from smelt.core.system import peak_memory_bytes, reset_peak_memory
    from smelt.pipeline.execute.run import RunOptions, run_plan
    from smelt.pipeline.execute.scoring import Scorer
    from smelt.pipeline.execute.step_runner import StepRunner
    from smelt.pipeline.plan.load_plan import load_plan

    name, _, scoring = step.partition(", ")
    owner, method = (Scorer, "score") if scoring else (StepRunner, "run_step")
    original, found = getattr(owner, method), dict[str, float]()

    def measured(self: Any, what: Any, *arguments: Any) -> Any:
        if not scoring and what.name != name:
            return original(self, what, *arguments)
        reset_peak_memory()
        began, passed = time.process_time(), time.monotonic()
        result = original(self, what, *arguments)
        found.update(
            seconds=time.process_time() - began,
            wall_seconds=time.monotonic() - passed,
            memory_bytes=peak_memory_bytes(),
            disk_bytes=0 if scoring else sum(f.size_bytes for f in result[0].manifest.files.values()),
        )
        return result

    setattr(owner, method, measured)
    ended = run_plan(load_plan(recipe), RunOptions(out, quiet=True, scored=bool(scoring)))
    assert ended.exit_code == 0, ended.report.data["steps"][-1]["error"]
    return found


def predict(file: Path, step: str, out: Path) -> dict[str, float]:
    """Return what `smelt plan` predicts for the step."""
    command = [sys.executable, "-m", "smelt", "plan", str(file), "--json", "--measure", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    name, _, scoring = step.partition(", ")
    found = next(s for s in json.loads(done.stdout)["costs"]["steps"] if s["name"] == name)
    if scoring:
        return {
            "seconds": found["scoring_seconds"],
            "memory_bytes": found["scoring_memory_bytes"],
            "disk_bytes": 0,
        }
    return {key: found[key] for key in ("seconds", "memory_bytes", "disk_bytes")}


def run_case(name: str, case: Case, space: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Return predictions and measurements of one case; known: measurements to keep."""
    recipe, step = case
    folder = space / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "recipe.yaml"
    scored = recipe.get("score", {}) | {"latency": False, "sqnr_samples": 0, "kl_samples": 0}
    file.write_text(json.dumps(recipe | {"threads": 1, "score": scored}))  # JSON is YAML
    predicted = predict(file, step, folder / "run" / "out")
    if known is None:
        command = [sys.executable, __file__, "--measure", str(file), step, "--space", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        known = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(folder / "run", ignore_errors=True)
    return {"predicted": predicted, "measured": known}


def table(found: dict[str, Any]) -> str:
    """Return the predictions, the measurements and their ratios as a table in Markdown."""
    rows = ["|case|time, s|ratio|memory, MB|ratio|disk, MB|ratio|", "|---|---|---|---|---|---|---|"]
    units = {"seconds": 1.0, "memory_bytes": 1e6, "disk_bytes": 1e6}
    for name, case in found.items():
        cells = [name]
        for key, unit in units.items():
            guess, real = (case[kind][key] / unit for kind in ("predicted", "measured"))
            cells += [f"{guess:,.0f}, {real:,.0f}", f"{guess / real:.2f}"] if real else ["", ""]
        rows.append(f"|{'|'.join(cells)}|")
    return "\n".join(rows)


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--space", type=Path, default=Path("build/plan"))
    parser.add_argument("--measure", nargs=2)
    parser.add_argument("--predict", action="store_true", help="keep the measurements of results.json")
    given = parser.parse_args()
    if given.measure:
        file, step = given.measure
        print(json.dumps(measure(Path(file), step, given.space / "run" / "out")))
        return
    space = given.space.resolve()
    space.mkdir(parents=True, exist_ok=True)
    for name in LLAMAS:
        if not (space / name / "config.json").is_file():
            write_llama(space / name, name, given.shared / "data" / "wikitext2" / "validation.txt.gz")
    every = cases(given.shared.resolve(), given.minilm.resolve(), space)
    results = space / "results.json"
    found = json.loads(results.read_text()) if results.is_file() else {}
    for name in given.cases or every:
        known = found[name]["measured"] if given.predict and name in found else None
        found[name] = run_case(name, every[name], space, known)
        results.write_text(json.dumps(found, indent=1))
    print(table({name: found[name] for name in given.cases or every}))


if __name__ == "__main__":
    main()
