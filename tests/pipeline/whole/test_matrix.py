"""Every family through every technique on tiny random models: run, saved, loaded, scored, exported, compared.

The onnx stage compares each graph with its parent on real inputs, so a step that is done has passed that.
Techniques and models are those of `paired_techniques`; which go together, stages and plan say. The fast part
takes each family through a chain that ends in few bits. All cells one by one:

    SMELT_MATRIX=all python -m pytest tests/pipeline/whole/test_matrix.py
"""

from functools import partial

import pytest

import smelt
from smelt.models.families.registry import FAMILIES
from smelt.quantization.schemes.registry import SCHEMES, unsupported_reason
from smelt.runtimes.ort_tensorrt_backend import read_provider_options
from smelt.runtimes.ort_tensorrt_provider import missing_requirement
from tests.support.graphs.ort_sessions import HAS_NO_VNNI
from tests.support.models import embedders, seq2seq
from tests.support.pairs import matrix
from tests.support.pairs.pair_cases import can_follow, is_applicable
from tests.support.pairs.paired_techniques import (
    MODELS,
    TECHNIQUES,
    TinyModel,
    with_prerequisite,
    write_recipe,
)

ALL_MODELS = MODELS | {
    "t5-plain": TinyModel("t5", "summarization", seq2seq.write_t5),
    **{
        f"{name}-embedder": TinyModel(name, embedders.TASK, partial(embedders.write_embedder, family=name))
        for name in embedders.FAMILIES
    },
}
CHAINS = {
    "chain": ("student", "prune", "factorize", "int4"),
    "chain-shared": ("share", "finetune", "prune", "int8-dynamic"),
    "chain-static": ("prune", "int8-plain", "finetune"),
    "chain-smooth": ("factorize", "int8-static", "finetune"),
    "chain-listed": ("shortlist", "prune", "finetune", "int4"), "chain-inside": ("prune", "lora", "student"),
    "chain-binary": ("prune", "binary", "finetune"), "chain-deep": ("depth", "prune", "finetune", "int4"),
    "chain-parts": ("depth-parts", "prune", "finetune", "int4"),
    "chain-narrow": ("width", "prune", "finetune", "int4"),
    "chain-channels": ("channels", "finetune", "channels"),
    "chain-static-convolutions": ("int8-plain", "finetune"),
    "chain-convolutions": ("channels", "int8-plain", "finetune"),
    "chain-words": ("vocabulary", "student", "int8-dynamic"),
    "chain-sparse": ("sparsify", "prune", "finetune", "int8-dynamic"),
    "chain-learned": ("masks", "movement", "prune", "int8-dynamic"),
    "chain-awq": ("factorize", "awq", "lora"), "chain-divided": ("share-difference", "finetune", "low-rank"),
    "chain-qlora": ("bnb-nf4", "lora"),
}  # fmt: skip
ROWS = {name: with_prerequisite(name) for name in TECHNIQUES} | CHAINS
# each way of writing graphs with the chains that change them; the other families and chains with
# SMELT_MATRIX=all; each technique on each family, without graphs, is in test_pairs.py
FAST = {
    ("modernbert-embedder", "chain-binary"), ("m2m_100", "chain-listed"),
    ("gpt2", "chain-qlora"), ("pegasus", "chain-words"), ("llama", "chain-awq"), ("albert", "chain"),
    ("t5", "chain-parts"), ("resnet", "chain-convolutions"), ("electra", "chain-narrow"),
    ("gpt_neox", "chain"), ("granite", "chain"), ("smollm3", "chain-awq"), ("mt5", "chain"),
    ("gemma3_text", "chain"), ("phi", "chain"), ("mixtral", "chain"),
    ("deberta-v2", "chain-narrow"), ("dinov2", "chain"), ("mobilenet_v2", "chain-static-convolutions"),
}  # fmt: skip


def _is_possible(model, row):
    """Whether each technique of a row can do something with a model, and can follow those before it."""
    techniques = [TECHNIQUES[name] for name in ROWS[row]]
    pairs = [(first, second) for index, second in enumerate(techniques) for first in techniques[:index]]
    prerequisites = [TECHNIQUES[t.applied_after] for t in techniques if t.applied_after]
    return all(is_applicable(ALL_MODELS[model], technique) for technique in techniques) and all(
        first in prerequisites or can_follow(first, second) for first, second in pairs
    )


def _cells(rows, fast):
    """The cells of these rows: all of them, or the fast ones."""
    if not matrix.is_full_matrix():
        return sorted(fast)
    return sorted((model, row) for model in ALL_MODELS for row in rows if _is_possible(model, row))


CELLS = _cells(ROWS, FAST)
# what OpenVINO runs of them: graphs in float32, and int8 as explicit Q/DQ
CELLS_OPENVINO = _cells(
    ["prune", "int8-plain", "int8-static"], {("llama", "int8-static"), ("resnet", "int8-plain")}
)
# TensorRT's graphs with the sizes of engines, for ONNX Runtime's provider of it, in float32 and int8
CELLS_PROVIDER = _cells(["prune", "int8-plain"], {("qwen2", "prune")})
CELLS_PROVIDER = [  # convolutions in int8 are refused
    (name, row)
    for name, row in CELLS_PROVIDER
    if row != "int8-plain" or FAMILIES[ALL_MODELS[name].kind].stacks({})
]


def _schemes(row):
    """The quantization schemes that the techniques of a row name."""
    schemes = (TECHNIQUES[name].settings.get("scheme") for name in ROWS[row])
    return [scheme for scheme in schemes if scheme is not None]


@pytest.mark.parametrize(("family", "row"), CELLS)
def test_family_passes_techniques_and_graph_equals_parent(family, row, tmp_path):
    exported = not any(unsupported_reason(SCHEMES[scheme], "ort-cpu") for scheme in _schemes(row))
    _check(family, row, "ort-cpu" if exported else None, tmp_path)


@pytest.mark.parametrize(("family", "row"), CELLS_OPENVINO)
def test_family_passes_techniques_and_openvino_runs_graph(family, row, tmp_path):
    pytest.importorskip("openvino")
    if HAS_NO_VNNI and row.startswith("int8"):
        pytest.skip("without VNNI OpenVINO adds pairs of int8 products in 16 bits")
    _check(family, row, "openvino", tmp_path)


@pytest.mark.parametrize(("family", "row"), CELLS_PROVIDER)
def test_family_passes_techniques_and_ort_tensorrt_gets_shapes(family, row, tmp_path):
    """Without a GPU the step is made and not scored; its graph agrees with its parent in any case."""
    last = _check(family, row, "ort-tensorrt", tmp_path)
    folder = tmp_path / "run" / last["artifact"]
    options = read_provider_options(folder)
    assert set(options) == set(last["details"]["graphs"]) == {path.stem for path in folder.glob("*.onnx")}
    for graph in options.values():
        kind = FAMILIES[ALL_MODELS[family].kind].input_kind
        assert ("pixel_values" if kind == "images" else "input_ids") in graph.max_shapes
        assert graph.options["trt_int8_enable"] == str(row == "int8-plain")


def _check(family, row, target, tmp_path):
    model = ALL_MODELS[family]
    model.make(tmp_path / "model")
    recipe = write_recipe(tmp_path, model, ROWS[row], target)
    result = smelt.run(recipe, out=tmp_path / "run")
    steps = result.report["steps"]
    assert [s["status"] for s in steps] == ["done"] * len(steps), [s["error"] for s in steps]
    assert result.exit_code == 0
    unscored = target == "ort-tensorrt" and missing_requirement() is not None
    assert all(s["quality"] for s in (steps[:-1] if unscored else steps))
    assert steps[-1]["target"] == target
    if target is None:
        return steps[-1]
    parity = steps[-1]["details"]["parity"]
    assert set(parity) == set(steps[-1]["details"]["graphs"])
    if model.task == "language-modeling" and not unscored:
        parent, graph = (s["quality"]["perplexity"]["value"] for s in steps[-2:])
        assert graph == pytest.approx(parent, rel=0.02)
    return steps[-1]
