"""What each stage makes of fixed input, in few numbers: results must not change under one `version`.

The key of a stored artifact holds its stage's `version`. A stage that computes something else under the same
version would be served old results, so `tests/house/test_golden.py` compares what the stages make of tiny
models with golden.json. As a script this writes golden.json again (`make golden`), and refuses where results
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.goldens.golden_cases import CASES, MAKERS, THIRD_PARTY_GRAPH, Case
from tests.support.graphs import graph_outline
from tests.support.models import causal, images, tiny

FILE = Path(__file__).with_name("golden.json")
LIBRARIES = ("torch", "transformers", "tokenizers", "sentencepiece", "onnx", "onnxscript", "onnxsim")


def libraries() -> str:
    """Return the versions on which results depend, to their second number."""
    return ", ".join(f"{name} {'.'.join(version(name).split('.')[:2])}" for name in LIBRARIES)


def stage_version(case: Case) -> str:
    """Return the versions of the stages that make the case's result, the first one first."""
    from smelt.pipeline.recipe.stages import load_stage

    stages = [*(stage_name for stage_name, _ in case.preceding_stages), case.stage]
    return " + ".join(f"{stage_name} {load_stage(stage_name).version}" for stage_name in stages)


def fingerprint(case: Case) -> dict[str, Any]:
    """Run the case; return what is exact of its result and what is not."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = run_case(case, Path(folder))
        if case.family == THIRD_PARTY_GRAPH or case.stage == "onnx":
            return _graphs_fingerprint(out)
        fingerprint_values = _model_fingerprint(out, source if case.settings.get("max_steps") else None)
        if case.stage == "quantize":
            outputs = _projections({"outputs": _float_outputs(out)})
            fingerprint_values["numbers"] = (
                outputs if case.outputs_only else fingerprint_values["numbers"] | outputs
            )
        return fingerprint_values


def run_case(case: Case, folder: Path) -> tuple[Path, Path]:
    """Run the case in an empty folder; return the folders of the stage's source and of its result."""
    if case.family == THIRD_PARTY_GRAPH:
        return _run_on_graph(case, folder)
    make, task = MAKERS[case.family]
    model = make(folder / "model")
    _set_integer_weights(model, 1)
    source, teacher = model, tiny.as_artifact(model, task)
    if case.stage == "distill":  # a student is not its own teacher
        source = make(folder / "student")
        _set_integer_weights(source, 2)
    for number, (stage_name, settings) in enumerate(case.preceding_stages):
        source = _run_stage(stage_name, settings, source, task, teacher, folder / str(number))
    return source, _run_stage(case.stage, case.settings, source, task, teacher, folder / "out")


def _set_integer_weights(folder: Path, seed: int) -> None:
    """Give the model in `folder` weights that are made of integers alone."""
    import torch

    from smelt.models.checkpoint import load_model, save_model

    model, edits = load_model(folder)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            values = (_random_bits(parameter.numel(), 1000 * seed + number) >> np.uint64(40)).astype(
                np.float64
            )
            values = (values / 2**23 - 1).astype(np.float32).reshape(parameter.shape)
            scale, center = (
                (0.5, 0.0) if parameter.dim() > 1 else (0.125, 1.0 if "norm" in name.lower() else 0.0)
            )
            parameter.copy_(torch.from_numpy(values) * scale + center)
    other = folder.with_name(f"{folder.name}-settled")
    other.mkdir()
    save_model(model, edits, other, folder)
    for path in other.iterdir():
        path.replace(folder / path.name)


def _random_bits(count: int, seed: int) -> Any:
    """Return uint64 [count], well mixed (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _run_stage(stage_name: str, settings: Any, source: Path, task: str, teacher: Any, out: Path) -> Path:
    """Run a stage as the pipeline does; return its folder."""
    from smelt.data.splits import Columns, Split
    from smelt.pipeline.recipe.stages import load_stage
    from smelt.stage import Context
    from smelt.tasks.read_split import read_split

    out.mkdir()
    rows = out.parent / "rows"
    if task == "language-modeling":
        split: Split = read_split(str(causal.write_lines(rows.with_suffix(".txt"), 30)), task, Columns(), out)
    elif task == images.TASK:
        split = images.read_rows(images.write_rows(rows.with_suffix(".jsonl")))
    else:
        write = tiny.write_labeled if task == "text-classification" else tiny.write_pairs
        split = read_split(str(write(rows.with_suffix(".jsonl"), 16)), task, Columns(), out)
    data = {"train": split, "validation": split}
    ctx = Context(
        out=out, task=task, data=data, seed=7, ancestors={"model": teacher}, score=lambda a: {}, threads=1,
        device="cpu",
    )  # fmt: skip
    stage = load_stage(stage_name)
    stage()(tiny.as_artifact(source, task), stage.settings_type(**settings), ctx)
    return out


def _run_on_graph(case: Case, folder: Path) -> tuple[Path, Path]:
    """Run a stage on an imported graph; return the folders of the graph and of the result."""
    from smelt.pipeline.recipe.stages import load_stage
    from tests.support import harness
    from tests.support.graphs import imported_graphs

    stage = load_stage(case.stage)
    source = imported_graphs.make_artifact(folder / "source", imported_graphs.two_layer_classifier())
    rows = {"calibration": imported_graphs.make_split()}
    settings = stage.settings_type(**case.settings)
    return source.path, harness.run_stage(stage(), settings, source, folder / "out", data=rows).out


def _load_arrays(path: Path) -> dict[str, Any]:
    """Return the tensors of a file; floats of one byte, which numpy does not have, as float32."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {
        n: (t.float() if t.is_floating_point() and t.itemsize == 1 else t).numpy() for n, t in tensors.items()
    }


def _model_fingerprint(out: Path, trained_from: Path | None) -> dict[str, Any]:
    """Return shapes, edits, and projections of the weights, of their change where they were trained."""
    stored = _load_arrays(out / "model.safetensors")
    shortlist = out / "shortlist.safetensors"
    stored |= _load_arrays(shortlist) if shortlist.is_file() else {}
    tensors = _dequantize_arrays(stored, out)
    before = {}
    if trained_from:
        before = _dequantize_arrays(_load_arrays(trained_from / "model.safetensors"), trained_from)
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
    shapes = sorted(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in stored.items())
    return {"exact": {"tensors": _digest(shapes), "edits": _digest(edits)}, "numbers": _projections(values)}


def _dequantize_arrays(arrays: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `arrays` of the model in `folder` with values in place of quantized weights.

    Where two grids of a group are nearly as good, processors may choose either: all codes of the group then
    differ, its values by less than a rounding step.
    """
    if not any(name.endswith(".codes") for name in arrays):
        return arrays
    from smelt.models.checkpoint import load_model
    from smelt.quantization.layers import QuantizedMatrix

    values = dict(arrays)
    for name, matrix in load_model(folder)[0].named_modules():
        if isinstance(matrix, QuantizedMatrix):
            of_activations = matrix.scheme.activation_tensors(-1.0, 1.0, matrix.options)
            for tensor, _ in matrix.named_parameters():
                if tensor not in of_activations:
                    values.pop(f"{name}.{tensor}", None)
            values[f"{name}.values"] = matrix.dequantize().detach().numpy()
    return values


def _float_outputs(folder: Path) -> Any:
    """Return the logits of a model on fixed inputs, its quantized weights multiplied as floats."""
    import torch
    from torch import nn

    from smelt.models.checkpoint import load_model
    from smelt.quantization.layers import QuantizedLinear

    model, _ = load_model(folder)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    for name, layer in layers:
        owner, _, attribute = name.rpartition(".")
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight.data = layer.matrix.dequantize().detach()
        plain.bias = layer.bias
        setattr(model.get_submodule(owner), attribute, plain)
    with torch.no_grad():
        return model(**_example_inputs(model)).logits.numpy()


def _example_inputs(model: Any) -> dict[str, Any]:
    """Return a batch of 16 samples, of integers and multiples of an eighth."""
    import torch

    if model.main_input_name == "pixel_values":
        pixels = (_random_bits(16 * 3 * 32 * 32, 5) % np.uint64(17)).astype(np.float32) / 8 - 1
        return {"pixel_values": torch.from_numpy(pixels).reshape(16, 3, 32, 32)}
    tokens = 5 + (_random_bits(16 * 8, 5) % np.uint64(min(model.config.vocab_size, 40) - 9)).astype(np.int64)
    ids = torch.from_numpy(tokens).reshape(16, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return batch | ({"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {})


def _graphs_fingerprint(out: Path) -> dict[str, Any]:
    """Return for each graph its operators, its structure, and projections of its constants."""
    import onnx

    exact, numbers = {}, {}
    for path in sorted(out.glob("*.onnx")):
        model = onnx.load(path)
        kinds = Counter(node.op_type for node in model.graph.node)
        exact[path.stem] = {
            "operators": dict(sorted(kinds.items())),
            "structure": _digest(graph_outline.outline_lines(model)),
        }
        numbers |= _projections(graph_outline.ordered_constants(model.graph), path.stem)
    return {"exact": exact, "numbers": numbers}


def _projections(values: dict[str, Any], prefix: str = "") -> dict[str, list[float]]:
    """Return for each kind of tensor its root mean square and two projections on fixed signs.

    Each is about 1 by chance: sum(sign * x) / (sqrt(n) * rms), over all tensors of the kind.
    """
    projections: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for number, (name, tensor) in enumerate(sorted(values.items())):
        x = np.asarray(tensor, dtype=np.float64).ravel()
        x = np.where(np.isfinite(x), x, 0.0)  # a token that never comes has a score of minus infinity
        signs = [
            1.0 - 2.0 * (_random_bits(x.size, 77 + 2 * number + k) & np.uint64(1)).astype(np.float64)
            for k in (0, 1)
        ]
        kind = ".".join(component for component in name.split(".")[-2:] if not component.isdigit())
        projections[f"{prefix} {kind}".strip()].append(
            (x.size, float((x * x).sum()), *(float(s @ x) for s in signs))
        )
    result = {}
    for kind, rows in projections.items():
        size, squares, *sums = (sum(component[i] for component in rows) for i in range(4))
        rms = float(np.sqrt(squares / size))
        result[kind] = [float(f"{v:.6g}") for v in (rms, *(s / (np.sqrt(size) * rms or 1.0) for s in sums))]
    return result


def _digest(value: Any) -> str:
    from smelt.core.files import json_hash

    return json_hash(value if isinstance(value, list | dict) else list(value))[:16]


def fingerprint_differences(golden: dict[str, Any], now: dict[str, Any], allowed: float = 0.002) -> list[str]:
    """Return what differs between two fingerprints, in words.

    Kernels for other processors (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS) moved what
    was trained by 0.0008 at most, what least squares fit by 0.005, and most else by nothing; another schedule
    of the learning rate moves it by 0.05.

    Args:
        golden: of before.
        now: of the same case.
        allowed: how far projections may be off; root mean squares by at most 0.01, or a fifth of it.
    """
    differences = []
    for name in sorted(golden["exact"].keys() | now["exact"].keys()):
        old, new = golden["exact"].get(name), now["exact"].get(name)
        if old != new:
            differences.append(f"{name}: {old} became {new}")
    for kind in sorted(golden["numbers"].keys() | now["numbers"].keys()):
        old, new = (f["numbers"].get(kind, [0.0, 0.0, 0.0]) for f in (golden, now))
        size = abs(old[0] - new[0]) / (abs(old[0]) or 1.0)
        off = max(abs(a - b) for a, b in zip(old[1:], new[1:], strict=True))
        if size > min(allowed, max(0.01, allowed / 5)) or off > allowed:
            differences.append(f"{kind}: {old} became {new}")
    return differences


def read_golden() -> dict[str, Any]:
    """Return golden.json: case -> {"versions": ..., "libraries": {...: fingerprint}}."""
    entries: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return entries


def write_golden(names: list[str]) -> int:
    """Bring golden.json up to date; return 1 where a result changed under its version."""
    entries, library_versions, num_refused = read_golden(), libraries(), 0
    for name in names:
        case = CASES[name]
        now, versions = fingerprint(case), stage_version(case)
        old = entries.get(name, {"versions": versions, "libraries": {}})
        if old["versions"] == versions and library_versions in old["libraries"]:
            changed = fingerprint_differences(old["libraries"][library_versions], now, case.tolerance)
            if changed:
                num_refused = 1
                print(f"{name}: the result is another one under {versions}; raise the version of the stage:")
                print(*(f"  {line}" for line in changed[:6]), sep="\n")
            continue
        same = old["versions"] == versions
        entries[name] = {
            "versions": versions,
            "libraries": {**(old["libraries"] if same else {}), library_versions: now},
        }
        print(f"{name}: written for {versions}")
    text = json.dumps({n: entries[n] for n in CASES if n in entries}, indent=1)
    text = re.sub(
        r"\[\s+([^\[\]]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text
    )  # a list a line
    FILE.write_text(text + "\n", encoding="utf-8")
    return num_refused


if __name__ == "__main__":
    sys.exit(write_golden(sys.argv[1:] or list(CASES)))
