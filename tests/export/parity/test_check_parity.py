"""Errors put into finished graphs are found, in every scheme and kind of graph, and named.

tests/support/graphs/mutations.py says what each of them is. A graph in int8 is as far from torch as one
without its mask: only what is compared exactly distinguishes them.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import smelt.configs
from smelt.core.errors import ParityError
from smelt.data.splits import Columns
from smelt.export.graph_files import read_graph
from smelt.export.parity.check_parity import check_exported_graphs
from smelt.export.settings import OnnxSettings
from smelt.quantization.schemes import registry
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports, mutations
from tests.support.pairs import matrix

QUICKSTART = Path(smelt.configs.__file__).parent / "quickstart"
ENCODER, DECODER, MODEL = "encoder_model", "decoder_with_past_model", "model"
SCHEMES = tuple(graph_exports.SCHEMES)
CODES = ("int8", "static", "int4", "binary", "nf4")
WHOLE = ["drop_bias", "drop_sublayer", "drop_layer", "other_softness", "swap_heads"]
MASKS = ["drop_padding_mask", "mask_of_ones", "shift_the_mask"]
BIASES = ["bias_of_zeros", "norm_bias_of_zeros"]
PLACES = ["position_off_by_one", "shifted_table", "shorter_table"]
PROJECTIONS = ["swap_query_and_key", "swap_key_and_value"]
# found, though no single layer is far enough off to be blamed, or no node reads what is missing
UNNAMED = ("swap_outputs", "shorter_table", "other_gelu")
QUANTIZED = ["change_one_scale", "swap_two_scales", "take_another_layers_scales", "change_one_code"]

# what can go wrong with which graph of which family, in all schemes
GRAPHS: dict[tuple[str, str], list[str]] = {
    ("marian", ENCODER): [
        *WHOLE, *MASKS, *BIASES, *PLACES, *PROJECTIONS, "swap_outputs", "forget_embed_scale",
    ],
    ("marian", DECODER): [
        *WHOLE, *MASKS, *BIASES, *PLACES, *PROJECTIONS, "swap_layers_caches", "forget_embed_scale",
    ],
    ("bert", MODEL): [*WHOLE, *MASKS, *BIASES, *PROJECTIONS, "shifted_table", "other_gelu",
                      "forget_token_types"],
    ("gpt2", MODEL): [
        *WHOLE, *MASKS, *BIASES, *PLACES, "swap_parts_of_the_packed_product", "count_padding",
        "forget_positions", "other_gelu",
    ],
}  # fmt: skip
# the schemes that a family meets: every one with SMELT_MATRIX=all
MET = {"marian": ("int8", "int4"), "bert": ("static", "binary"), "gpt2": ("groupwise", "int8")}
if matrix.is_full_matrix():
    MET = dict.fromkeys(MET, SCHEMES[1:])
# every error without codes; one of a layer, a mask, a table and a projection with them, where comparing with
# the parent is not exact; all of them in all schemes with SMELT_MATRIX=all
CASES = [(f, "fp32", "fp32", g, m) for (f, g), names in GRAPHS.items() for m in names]
WITH_CODES = ("drop_bias", "drop_padding_mask", "shifted_table", "swap_key_and_value")
WITH_CODES += ("swap_parts_of_the_packed_product",)
CASES += [
    (f, s, "fp32", g, m)
    for (f, g), names in GRAPHS.items()
    for m, s in matrix.matrix_cells(
        [name for name in names if matrix.is_full_matrix() or name in WITH_CODES], MET[f]
    )
]
# what only some schemes have
CASES += [(f, s, "fp32", g, m) for f, g in GRAPHS for s in MET[f] if s in CODES for m in QUANTIZED]
ONLY = {"other_zero_point": ("int8", "int4"), "drop_zero_points": ("int4",)}
ONLY["change_one_scale_of_the_lookup"] = ("int8",)
CASES += [(f, s, "fp32", g, m) for f, g in GRAPHS for m, codes in ONLY.items() for s in codes if s in MET[f]]
# what only some families have
RELATIVE = ["relative_position_off_by_one", "shifted_table", "shorter_table", "drop_padding_mask"]
RELATIVE += ["swap_heads", "drop_layer"]
SHORT = [*MASKS, "shifted_table", "shorter_table", "swap_heads"]
CASES += [
    ("t5", s, "fp32", g, m)
    for g in (ENCODER, DECODER)
    for m, s in matrix.matrix_cells(RELATIVE, ("fp32", "int8"))
]
CASES += [("qwen2", s, "fp32", MODEL, m) for m, s in matrix.matrix_cells(SHORT, ("fp32", "int4"))]
# graphs of standard operators, for GPUs; in float16 rounding hides more than a mask
STANDARD = {
    ("marian", ENCODER): ["drop_bias", "drop_layer", "mask_of_ones", "shift_the_mask", *PLACES],
    ("marian", DECODER): ["drop_bias", "drop_layer", "mask_of_ones", "shift_the_mask", *PLACES],
    ("gpt2", MODEL): ["drop_layer", "mask_of_ones", "allow_the_future", "forget_positions", "count_padding"],
    ("qwen2", MODEL): ["drop_layer", "mask_of_ones", "allow_the_future", "forget_positions"],
}
KINDS = {"marian": ["fp16"], "gpt2": ["gpu", "fp16"], "qwen2": ["gpu"]}
CASES += [
    (f, "fp32", d, g, m)
    for (f, g), names in STANDARD.items()
    for m, d in matrix.matrix_cells(names, KINDS[f])
]


# what the check finds of a graph that is wrong
WRONG = ("parity-failed", "shape-mismatch", "constant-mismatch", "operator-mismatch")


def names_a_node(message, path):
    """Whether an error names a node of the graph."""
    return any(f"'{node.name}'" in message for node in read_graph(path, values=False).graph.node if node.name)


def exported(family, scheme, dtype):
    if dtype == "fp32":
        return graph_exports.exported_graphs(family, scheme)
    return graph_exports.exported_graphs(family, scheme, "tensorrt", "fp16" if dtype == "fp16" else "fp32")


def mutated(export, graph, mutation, folder):
    """Return what to ask about a copy of the graphs of which one is changed."""
    shutil.copytree(export.folder, folder)
    model = onnx.load(folder / f"{graph}.onnx")
    mutations.ALL[mutation](model)
    onnx.save(model, folder / f"{graph}.onnx")
    return replace(export.subject, folder=folder)


@pytest.mark.parametrize(("family", "scheme", "dtype", "graph", "mutation"), CASES)
def test_mutated_graph_is_detected_and_node_is_named(family, scheme, dtype, graph, mutation, tmp_path):
    original = exported(family, scheme, dtype)
    mutant = mutated(original, graph, mutation, tmp_path / "x")
    with pytest.raises(ParityError) as excinfo:
        check_exported_graphs(mutant, original.reference)
    message = str(excinfo.value)
    assert excinfo.value.code in WRONG, excinfo.value.code
    assert excinfo.value.file == f"{graph}.onnx", message
    assert names_a_node(message, mutant.folder / f"{graph}.onnx") or mutation in UNNAMED, message
    assert sorted(p.name for p in mutant.folder.iterdir()) == sorted(
        p.name for p in original.folder.iterdir()
    )


@pytest.mark.parametrize(("family", "scheme"), [(f, s) for f in MET for s in ("fp32", *MET[f])])
def test_correct_graph_passes_well_within_tolerance(family, scheme):
    original = exported(family, scheme, "fp32")
    for graph in original.subject.graphs:
        details = original.details["parity"][graph.name]
        assert details["exact"]["largest"] < 2e-5
        model = read_graph(original.folder / f"{graph.name}.onnx")
        operators = {kind for codes in registry.SCHEMES.values() for kind in codes.operators} - {"MatMul"}
        quantized = [n for n in model.graph.node if n.op_type in operators]
        assert details["operators"] == len(quantized)
        assert (scheme == "fp32") == (not quantized)
        assert details["constants"] > 10
        assert details["mean"] < 0.05


@pytest.mark.parametrize(("family", "scheme"), [("bert", "fp32"), ("gpt2", "fp32"), ("gpt2", "int8")])
def test_modified_parent_model_is_detected(family, scheme, tmp_path, monkeypatch):
    """Graph and parent then agree: only what the parent computed before tells."""
    from smelt.export.graphs import export_graph as onnx_graphs

    original = onnx_graphs._prepare_layers

    def prepare(graph, target):
        original(graph, target)
        norm = next(p for name, p in graph.module.named_parameters() if p.dim() == 1 and "weight" in name)
        norm.data.mul_(1.02)

    monkeypatch.setattr(onnx_graphs, "_prepare_layers", prepare)
    with raises_code("model-changed", ParityError) as excinfo:
        graph_exports.export_graphs(tmp_path, family, scheme)
    assert excinfo.value.file == "model.onnx"
    assert "logits" in str(excinfo.value)


def test_error_below_deployed_tolerance_is_detected(tmp_path):
    """An int8 graph without its mask is nearer to its parent than the tolerance that int8 needs."""
    from smelt.export.parity import check_parity

    original = exported("marian", "int8", "fp32")
    mutant = mutated(original, DECODER, "other_softness", tmp_path / "x")
    assert check_parity._check_as_deployed(mutant, original.reference)[DECODER]["mean"] < 0.05
    with raises_code("parity-failed", ParityError) as excinfo:
        check_exported_graphs(mutant, original.reference)
    assert "decoder.layers.0.self_attn.out_proj" in str(excinfo.value)


def test_graph_that_cannot_run_raises_parity_error(tmp_path):
    original = exported("bert", "fp32", "fp32")
    mutant = mutated(original, MODEL, "drop_bias", tmp_path / "x")
    model = onnx.load(mutant.folder / "model.onnx")
    next(n for n in model.graph.node if n.op_type == "MatMul").input[1] = "nowhere"
    onnx.save(model, mutant.folder / "model.onnx")
    with raises_code("graph-failed", ParityError) as excinfo:
        check_exported_graphs(mutant, original.reference)
    assert "nowhere" in str(excinfo.value)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The int8 graphs of a translator that was trained, and what parity asks of them."""
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings
    from tests.support.models import tiny

    folder = tmp_path_factory.mktemp("real")
    source = tiny.as_artifact(QUICKSTART / "model")
    codes = graph_exports.make_context(folder / "codes", "translation")
    Quantize()(source, QuantizeSettings(), codes)
    columns = Columns(source="source", target="target")
    data_path = str(QUICKSTART / "data" / "validation.jsonl.gz")
    data = {"validation": read_split(data_path, "translation", columns, QUICKSTART)}
    ctx = harness.make_context(folder / "onnx", data=data)
    subject, reference = graph_exports.capture_comparison(codes.out, OnnxSettings(simplify=False), ctx)
    return graph_exports.ExportedGraphs(ctx.out, subject, reference, ctx.details)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "mutation"), [(DECODER, "drop_padding_mask"), (ENCODER, "change_one_scale")]
)
def test_error_in_trained_int8_model_is_detected(real, graph, mutation, tmp_path):
    mutant = mutated(real, graph, mutation, tmp_path / "x")
    with pytest.raises(ParityError) as excinfo:
        check_exported_graphs(mutant, real.reference)
    assert excinfo.value.code in WRONG, excinfo.value.code
    assert excinfo.value.file == f"{graph}.onnx"
    assert names_a_node(str(excinfo.value), mutant.folder / f"{graph}.onnx")


@pytest.mark.slow
def test_trained_int8_model_is_exact_up_to_rounding(real):
    for graph in (ENCODER, DECODER):
        assert real.details["parity"][graph]["exact"]["largest"] < 1e-4
        assert real.details["parity"][graph]["mean"] < 0.05
