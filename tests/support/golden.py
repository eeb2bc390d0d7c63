"""What each stage makes of fixed input, in few numbers: results must not change under one `version`.

The key of a stored artifact holds its stage's `version`. A stage that computes something else under the same
version would be served old results, so `tests/house/test_golden.py` compares what the stages make of tiny
models with golden.json. As a script this writes golden.json anew (`make golden`), and refuses where results
changed and the version did not.

Weights come from integers, so that they are the same everywhere. Sums are not: processors add in different
orders. So numbers are compared with a tolerance, and what is exact (names, shapes, operators and their
attributes) as it is. Libraries change results too: entries are kept by their versions.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import causal
import images
import numpy as np
import outline
import seq2seq
import tiny

FILE = Path(__file__).with_name("golden.json")
LIBRARIES = ("torch", "transformers", "tokenizers", "sentencepiece", "onnx", "onnxscript", "onnxsim")
TRAINING: dict[str, Any] = {
    "max_steps": 8, "learning_rate": 3e-3, "batch_size": 4, "precision": "fp32", "dropout": 0.0, "evals": 0,
}  # fmt: skip
MAKERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "marian": (tiny.marian, "translation"),
    "t5": (seq2seq.t5, "summarization"),
    "bert": (tiny.bert, "text-classification"),
    "gpt2": (lambda folder: causal.model(folder, "gpt2", n_embd=64), "language-modeling"),
    "qwen2": (lambda folder: causal.model(folder, "qwen2"), "language-modeling"),
    "resnet": (lambda folder: images.model(folder, "resnet"), images.TASK),
}


@dataclass(frozen=True)
class Case:
    """A stage with settings on a tiny model of a family; `before` are stages that go first."""

    stage: str
    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    before: tuple[tuple[str, dict[str, Any]], ...] = ()
    allowed: float | None = None  # how far projections may be off, where it is not what `differences` says

    @property
    def tolerance(self) -> float:
        """How far projections may be off, see `differences`."""
        return self.allowed or (0.01 if self.settings.get("max_steps") else 0.002)


# Least squares on few tokens of a tiny model multiply what kernels round differently (0.005 was seen), and
# singular vectors of values that are nearly equal turn (0.08).
REFIT, TURNED = 0.02, 0.2
INSIDE: dict[str, Any] = {"hidden": 1, "embeddings": 1, "attention": 1, "cosine": 1, "relations": 1}
INT4: dict[str, Any] = {"scheme": "int4", "group_size": 16, "symmetric": False}
STATIC: dict[str, Any] = {"scheme": "int8-static", "range": "mse", "damage_rows": 2}
GROUPWISE: dict[str, Any] = {"scheme": "int8-groupwise", "group_size": 32}
NF4: dict[str, Any] = {"scheme": "bnb-nf4"}
INT3: dict[str, Any] = {"scheme": "int3", "group_size": 16, "symmetric": False}
KMEANS4: dict[str, Any] = {"scheme": "kmeans4", "codebook_inputs": 128}
POW2: dict[str, Any] = {"scheme": "pow2", "group_size": 32}
INT2: dict[str, Any] = {"scheme": "int2", "group_size": 32}
TERNARY: dict[str, Any] = {"scheme": "ternary", "group_size": 32, "granularity": "row"}
BINARY: dict[str, Any] = {"scheme": "binary", "group_size": 32}
LISTED: dict[str, Any] = {"per_token": 3, "frequent": 5}
GRAPH = "graph"  # in place of a family: an ONNX graph that somebody else exported
CASES: dict[str, Case] = {
    "finetune marian": Case("finetune", "marian", TRAINING | {"label_smoothing": 0.1}),
    "finetune bert": Case("finetune", "bert", TRAINING | {"schedule": "cosine", "ema": 0.8}),
    "finetune gpt2": Case("finetune", "gpt2", TRAINING | {"accumulate": 2}),
    "distill marian": Case("distill", "marian", TRAINING),
    "distill bert, half of its layers": Case("distill", "bert", TRAINING | {"student": {"layers": 1}}),
    "distill bert, inside": Case("distill", "bert", TRAINING | {"losses": INSIDE, "layer_map": {0: 0, 2: 1}}),
    "distill marian, through codes": Case("distill", "marian", TRAINING, (("quantize", BINARY),)),
    "finetune marian, learned scales": Case(
        "finetune", "marian", TRAINING | {"codes": {"scales": "lsq"}}, (("quantize", INT2),)
    ),
    "finetune bert, masks of the width": Case(
        "finetune",
        "bert",
        TRAINING | {"masks": {"what": ["ffn", "width"], "learning_rate": 5, "warmup": 0.5}},
    ),
    "finetune bert, split": Case(
        "finetune",
        "bert",
        TRAINING | {"codes": {"split": True}},
        (("quantize", {"scheme": "ternary", "group_size": 32}),),
    ),
    "finetune bert, binary inputs": Case(
        "finetune",
        "bert",
        TRAINING | {"codes": {"activations": "one-bit"}},
        (("quantize", {"scheme": "binary", "group_size": 32}),),
    ),
    "vocabulary marian": Case("vocabulary", "marian", {"coverage": 0.7, "round_to": 1}),
    "vocabulary gpt2": Case("vocabulary", "gpt2", {"size": 280}),
    "depth bert": Case("depth", "bert", {"importance": "block-influence"}),
    "depth marian, by the loss": Case("depth", "marian", {"decoder_layers": 1, "importance": "loss"}),
    "depth bert, of parts": Case("depth", "bert", {"what": ["attention", "ffn"], "keep": 0.75}),
    "prune bert": Case("prune", "bert", allowed=REFIT),
    "prune marian, by magnitude": Case("prune", "marian", {"importance": "magnitude"}, allowed=REFIT),
    "prune bert, across layers by Fisher": Case(
        "prune", "bert", {"scope": "global", "importance": "fisher"}, allowed=REFIT
    ),
    "prune qwen2": Case("prune", "qwen2", {"keep_heads": 0.5}),
    "prune bert, within a budget": Case(
        "prune", "bert", {"budget": {"parameters": 0.8}, "compensate": False}
    ),
    "prune bert, its width": Case("prune", "bert", {"what": ["width"]}, allowed=REFIT),
    "prune bert, not compensated": Case("prune", "bert", {"compensate": False}),
    "sparsify bert": Case("sparsify", "bert"),
    "sparsify marian, wanda 2:4": Case("sparsify", "marian", {"method": "wanda", "pattern": "2:4"}),
    "factorize marian, embeddings": Case("factorize", "marian", {"what": "embeddings", "rank": 7}),
    "factorize marian, one budget": Case(
        "factorize", "marian", {"budget": {"parameters": 0.5}, "aim": "size"}, allowed=TURNED
    ),
    "factorize bert, plain, by energy": Case(
        "factorize", "bert", {"method": "svd", "energy": 0.5, "aim": "size"}
    ),
    "factorize resnet, tucker": Case(
        "factorize", "resnet", {"method": "tucker", "ratio": 0.5}, allowed=TURNED
    ),
    "factorize resnet, cp by energy": Case(
        "factorize", "resnet", {"method": "cp", "energy": 0.8}, allowed=TURNED
    ),
    "share bert": Case("share", "bert"),
    "share marian, mean": Case("share", "marian", {"take": "mean", "what": ["ffn"]}),
    "share marian, with differences": Case(
        "share", "marian", {"take": "mean", "difference": {"rank": 4, "iterations": 2}}, allowed=TURNED
    ),
    "shortlist marian": Case("shortlist", "marian", LISTED),
    "quantize marian, int8": Case("quantize", "marian"),
    "quantize marian, int8-static": Case("quantize", "marian", STATIC),
    "quantize gpt2, int8-static of the worst float": Case("quantize", "gpt2", STATIC | {"skip": "auto"}),
    "quantize gpt2, int8-static smoothed": Case("quantize", "gpt2", STATIC | {"smooth": 0.5}),
    "quantize marian, int8-groupwise": Case("quantize", "marian", GROUPWISE),
    "quantize bert, int4": Case("quantize", "bert", INT4),
    "quantize gpt2, int4 symmetric": Case("quantize", "gpt2", INT4 | {"symmetric": True}),
    # with these no other alpha comes within 5 % of the best, so that all processors take the same ones
    "quantize bert, int3 by awq": Case(
        "quantize",
        "bert",
        INT4 | {"scheme": "int3", "group_size": 16, "method": "awq", "clip": "awq", "rows": 16},
    ),
    "quantize gpt2, int4 by hqq": Case("quantize", "gpt2", INT4 | {"method": "hqq"}),
    "quantize bert, int3": Case("quantize", "bert", INT3),
    "quantize gpt2, int2": Case("quantize", "gpt2", INT2),
    "quantize bert, kmeans4": Case("quantize", "bert", KMEANS4),
    "quantize gpt2, pow2": Case("quantize", "gpt2", POW2),
    "quantize marian, ternary": Case("quantize", "marian", TERNARY),
    "quantize bert, gptq": Case("quantize", "bert", INT4 | {"method": "gptq"}),
    "quantize gpt2, mixed precision": Case("quantize", "gpt2", {"bits": {"budget": 4.5}, "damage_rows": 2}),
    "quantize marian, binary": Case("quantize", "marian", BINARY),
    "quantize bert, int4 and pairs": Case(
        "quantize", "bert", INT4 | {"low_rank": {"rank": 4, "error": "outputs"}}, allowed=TURNED
    ),
    "quantize marian, bnb-nf4": Case("quantize", "marian", NF4),
    "quantize bert, bnb-int8": Case("quantize", "bert", {"scheme": "bnb-int8"}),
    "onnx marian": Case("onnx", "marian"),
    "onnx t5": Case("onnx", "t5"),
    "onnx gpt2": Case("onnx", "gpt2"),
    "onnx marian, int8": Case("onnx", "marian", {}, (("quantize", {}),)),
    "onnx marian, shortlist": Case("onnx", "marian", {}, (("shortlist", LISTED),)),
    "onnx marian, int8-static": Case("onnx", "marian", {}, (("quantize", STATIC),)),
    "onnx bert, int8-static for TensorRT": Case(
        "onnx", "bert", {"target": "tensorrt"}, (("quantize", STATIC),)
    ),
    "onnx marian, int8-groupwise": Case("onnx", "marian", {}, (("quantize", GROUPWISE),)),
    "onnx bert, int4": Case("onnx", "bert", {}, (("quantize", INT4),)),
    "onnx bert, int3": Case("onnx", "bert", {}, (("quantize", INT3),)),
    "onnx gpt2, int2": Case("onnx", "gpt2", {}, (("quantize", INT2),)),
    "onnx bert, kmeans4": Case("onnx", "bert", {}, (("quantize", KMEANS4),)),
    "onnx gpt2, pow2": Case("onnx", "gpt2", {}, (("quantize", POW2),)),
    "onnx marian, ternary": Case("onnx", "marian", {}, (("quantize", TERNARY),)),
    "onnx marian, bnb-nf4": Case("onnx", "marian", {}, (("quantize", NF4),)),
    "onnx marian, binary": Case("onnx", "marian", {}, (("quantize", BINARY),)),
    "onnx t5, shared": Case("onnx", "t5", {"simplify": False}, (("share", {}),)),
    "onnx bert, for TensorRT": Case("onnx", "bert", {"target": "tensorrt", "dtype": "fp16"}),
    "onnx qwen2, for TensorRT": Case("onnx", "qwen2", {"target": "tensorrt"}),
    "simplify graph": Case("simplify", GRAPH),
    "quantize-graph graph": Case("quantize-graph", GRAPH),
    "quantize-graph graph, static": Case("quantize-graph", GRAPH, {"scheme": "int8-static"}),
    "fp16 graph": Case("fp16", GRAPH),
}


def libraries() -> str:
    """Return the versions on which results depend, to their second number."""
    return ", ".join(f"{name} {'.'.join(version(name).split('.')[:2])}" for name in LIBRARIES)


def stage_version(case: Case) -> str:
    """Return the versions of the stages that make the case's result, the first one first."""
    from smelt.recipe.stage_table import load_stage

    words = [*(word for word, _ in case.before), case.stage]
    return " + ".join(f"{word} {load_stage(word).version}" for word in words)


def fingerprint(case: Case) -> dict[str, Any]:
    """Run the case; return what is exact of its result and what is not."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if case.family == GRAPH:
            return _of_graphs(_run_on_graph(case, folder))
        make, task = MAKERS[case.family]
        model = make(folder / "model")
        _settle(model, 1)
        source, teacher = model, tiny.artifact(model, task)
        if case.stage == "distill":  # a student is not its own teacher
            source = make(folder / "student")
            _settle(source, 2)
        for number, (word, settings) in enumerate(case.before):
            source = _run(word, settings, source, task, teacher, folder / str(number))
        out = _run(case.stage, case.settings, source, task, teacher, folder / "out")
        if case.stage == "onnx":
            return _of_graphs(out)
        return _of_model(out, source if case.settings.get("max_steps") else None)


def _settle(folder: Path, seed: int) -> None:
    """Give the model in `folder` weights that are made of integers alone."""
    import torch

    from smelt.runtime.models.checkpoint import load_model, save_model

    model, edits = load_model(folder)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            values = (_bits(parameter.numel(), 1000 * seed + number) >> np.uint64(40)).astype(np.float64)
            values = (values / 2**23 - 1).astype(np.float32).reshape(parameter.shape)
            scale, centre = (
                (0.5, 0.0) if parameter.dim() > 1 else (0.125, 1.0 if "norm" in name.lower() else 0.0)
            )
            parameter.copy_(torch.from_numpy(values) * scale + centre)
    other = folder.with_name(f"{folder.name}-settled")
    other.mkdir()
    save_model(model, edits, other, folder)
    for path in other.iterdir():
        path.replace(folder / path.name)


def _bits(count: int, seed: int) -> Any:
    """Return uint64 [count], well mixed (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _run(word: str, settings: Any, source: Path, task: str, teacher: Any, out: Path) -> Path:
    """Run a stage as the pipeline does; return its folder."""
    from smelt.core.data import Columns, Split
    from smelt.core.rows.examples import read_split
    from smelt.core.stage import Context
    from smelt.recipe.stage_table import load_stage

    out.mkdir()
    rows = out.parent / "rows"
    if task == "language-modeling":
        split: Split = read_split(str(causal.lines(rows.with_suffix(".txt"), 30)), task, Columns(), out)
    elif task == images.TASK:
        split = images.split(images.rows(rows.with_suffix(".jsonl")))
    else:
        write = tiny.labelled if task == "text-classification" else tiny.pairs
        split = read_split(str(write(rows.with_suffix(".jsonl"), 16)), task, Columns(), out)
    data = {"train": split, "validation": split}
    ctx = Context(
        out=out, task=task, data=data, seed=7, ancestors={"model": teacher}, score=lambda a: {}, threads=1,
        device="cpu",
    )  # fmt: skip
    stage = load_stage(word)
    stage()(tiny.artifact(source, task), stage.settings_type(**settings), ctx)
    return out


def _run_on_graph(case: Case, folder: Path) -> Path:
    """Run a stage on a graph of somebody else; return its folder."""
    import foreign_graphs
    import harness

    from smelt.recipe.stage_table import load_stage

    stage = load_stage(case.stage)
    source = foreign_graphs.artifact(folder / "source", foreign_graphs.two_layers())
    rows = {"calibration": foreign_graphs.split()}
    return harness.run(stage(), stage.settings_type(**case.settings), source, folder / "out", data=rows).out


def _of_model(out: Path, trained_from: Path | None) -> dict[str, Any]:
    """Return shapes, edits, and projections of the weights, of their change where they were trained."""
    from safetensors.numpy import load_file

    tensors = load_file(out / "model.safetensors")
    shortlist = out / "shortlist.safetensors"
    tensors |= load_file(shortlist) if shortlist.is_file() else {}
    before = load_file(trained_from / "model.safetensors") if trained_from else {}
    structure = out / "structure.json"
    edits = json.loads(structure.read_text()) if structure.is_file() else []
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if re.search(r"\b(k_proj|key|k_lin)\.bias$", name) or ".first." in name or ".second." in name:
            continue  # no gradient but rounding; factors, whose signs are free
        if ".steps." in name:  # those of a convolution, whose signs are free too
            values[name] = np.abs(tensor)
            continue
        old = before.get(name)
        changed = old is not None and old.shape == tensor.shape and tensor.dtype.kind == "f"
        values[name] = tensor - old if changed and old is not None else tensor
    shapes = sorted(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
    return {"exact": {"tensors": _digest(shapes), "edits": _digest(edits)}, "numbers": _projections(values)}


def _of_graphs(out: Path) -> dict[str, Any]:
    """Return for each graph its operators, its structure, and projections of its constants."""
    import onnx

    exact, numbers = {}, {}
    for path in sorted(out.glob("*.onnx")):
        model = onnx.load(path)
        kinds = Counter(node.op_type for node in model.graph.node)
        exact[path.stem] = {
            "operators": dict(sorted(kinds.items())),
            "structure": _digest(outline.lines(model)),
        }
        numbers |= _projections(outline.constants_of(model.graph), path.stem)
    return {"exact": exact, "numbers": numbers}


def _projections(values: dict[str, Any], prefix: str = "") -> dict[str, list[float]]:
    """Return for each kind of tensor its root mean square and two projections on fixed signs.

    Each is about 1 by chance: sum(sign * x) / (sqrt(n) * rms), over all tensors of the kind.
    """
    found: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for number, (name, tensor) in enumerate(sorted(values.items())):
        x = np.asarray(tensor, dtype=np.float64).ravel()
        x = np.where(np.isfinite(x), x, 0.0)  # a token that never comes has a score of minus infinity
        signs = [
            1.0 - 2.0 * (_bits(x.size, 77 + 2 * number + k) & np.uint64(1)).astype(np.float64) for k in (0, 1)
        ]
        kind = ".".join(part for part in name.split(".")[-2:] if not part.isdigit())
        found[f"{prefix} {kind}".strip()].append(
            (x.size, float((x * x).sum()), *(float(s @ x) for s in signs))
        )
    result = {}
    for kind, parts in found.items():
        size, squares, *sums = (sum(part[i] for part in parts) for i in range(4))
        rms = float(np.sqrt(squares / size))
        result[kind] = [float(f"{v:.6g}") for v in (rms, *(s / (np.sqrt(size) * rms or 1.0) for s in sums))]
    return result


def _digest(value: Any) -> str:
    from smelt.core.files import hash_of

    return hash_of(value if isinstance(value, list | dict) else list(value))[:16]


def differences(golden: dict[str, Any], now: dict[str, Any], allowed: float = 0.002) -> list[str]:
    """Return what differs between two fingerprints, in words.

    Kernels for other processors (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS) moved what
    was trained by 0.0008 at most, what least squares fit by 0.005, and most else by nothing; another schedule
    of the learning rate moves it by 0.05.

    Args:
        golden: of before.
        now: of the same case.
        allowed: how far projections may be off; root mean squares by no more than a hundredth.
    """
    found = []
    for name in sorted(golden["exact"].keys() | now["exact"].keys()):
        old, new = golden["exact"].get(name), now["exact"].get(name)
        if old != new:
            found.append(f"{name}: {old} became {new}")
    for kind in sorted(golden["numbers"].keys() | now["numbers"].keys()):
        old, new = (f["numbers"].get(kind, [0.0, 0.0, 0.0]) for f in (golden, now))
        size = abs(old[0] - new[0]) / (abs(old[0]) or 1.0)
        off = max(abs(a - b) for a, b in zip(old[1:], new[1:], strict=True))
        if size > min(allowed, 0.01) or off > allowed:
            found.append(f"{kind}: {old} became {new}")
    return found


def read() -> dict[str, Any]:
    """Return golden.json: case -> {"versions": ..., "libraries": {...: fingerprint}}."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return found


def write(names: list[str]) -> int:
    """Bring golden.json up to date; return 1 where a result changed under its version."""
    kept, here, refused = read(), libraries(), 0
    for name in names:
        case = CASES[name]
        now, versions = fingerprint(case), stage_version(case)
        old = kept.get(name, {"versions": versions, "libraries": {}})
        if old["versions"] == versions and here in old["libraries"]:
            changed = differences(old["libraries"][here], now, case.tolerance)
            if changed:
                refused = 1
                print(f"{name}: the result is another one under {versions}; raise the version of the stage:")
                print(*(f"  {line}" for line in changed[:6]), sep="\n")
            continue
        same = old["versions"] == versions
        kept[name] = {"versions": versions, "libraries": {**(old["libraries"] if same else {}), here: now}}
        print(f"{name}: written for {versions}")
    text = json.dumps({n: kept[n] for n in CASES if n in kept}, indent=1)
    text = re.sub(
        r"\[\s+([^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text
    )  # a list a line
    FILE.write_text(text + "\n", encoding="utf-8")
    return refused


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:] or list(CASES)))
