"""Which operator a product leaves as. The times are made up, but for one test that takes real ones."""

import re

import onnx
import pytest

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.messages import message_codes
from smelt.export import autotune
from smelt.export.autotune import choose_variants, fastest_variant, quantized_layers
from smelt.export.graphs.export_graph import model_graphs
from smelt.export.onnx_stage import Onnx
from smelt.export.parity import check_parity
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.quantization.schemes.registry import default_options, find_scheme
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.graphs import graph_exports
from tests.support.models import causal, every_family, tiny

DYNAMIC, BLOCKS = "DynamicQuantizeMatMul", "MatMulNBits"


@pytest.mark.parametrize(("us", "taken"), [
    ({DYNAMIC: [10.0], BLOCKS: [12.0]}, DYNAMIC),
    ({DYNAMIC: [10.0], BLOCKS: [9.6]}, DYNAMIC),  # within the margin
    ({DYNAMIC: [10.0], BLOCKS: [9.4]}, BLOCKS),
    ({DYNAMIC: [1.0, 8.0], BLOCKS: [0.5, 8.1]}, DYNAMIC),  # slower at the second batch size
    ({DYNAMIC: [1.0, 8.0], BLOCKS: [0.5, 8.0]}, BLOCKS),
    ({DYNAMIC: [1.0, 8.0], "slower": [0.1, 9.0], BLOCKS: [0.8, 7.0]}, BLOCKS),
])  # fmt: skip
def test_variant_is_chosen_only_if_clearly_faster(us, taken):
    assert fastest_variant(us) == taken


def write_translator(folder):
    """Write a Marian of one layer a stack; return its folder."""
    return tiny.write_marian(folder, **graph_exports.ONE_LAYER_PER_STACK)


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """A folder with a Marian in int8."""
    folder = tmp_path_factory.mktemp("tune")
    source = write_translator(folder / "model")
    graph_exports.randomize_biases(source)
    harness.run_stage(Quantize(), QuantizeSettings(), source, folder / "int8")
    return folder / "int8"


def export(folder, out, task="translation", **settings):
    """Without the graphs of loops, which are put together from the others, and without onnxsim."""
    ctx = graph_exports.make_context(out, task)
    Onnx()(
        tiny.as_artifact(folder, task),
        OnnxSettings(**{"generation_graph": False, "simplify": False} | settings),
        ctx,
    )
    return ctx


def few_rows_are_for_blocks(scheme, options, width, outputs, rows, threads):
    return {DYNAMIC: 2.0 * rows, BLOCKS: rows * (1.0 if rows < 4 else 3.0)}


def test_fastest_operator_per_layer_is_exported_and_reported(coded, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "measure_variants", few_rows_are_for_blocks)
    details = export(coded, tmp_path / "out", autotune=True).details
    operators_by_graph = {name: graph["operators"] for name, graph in details["graphs"].items()}
    assert BLOCKS not in operators_by_graph["encoder_model"]
    assert DYNAMIC not in operators_by_graph["decoder_with_past_model"]
    layers, length = details["autotune"]["layers"], details["autotune"]["input_tokens"]
    assert len(layers[DYNAMIC]) == operators_by_graph["encoder_model"][DYNAMIC]
    assert len(layers[BLOCKS]) == operators_by_graph["decoder_with_past_model"][BLOCKS]
    assert "decoder_with_past_model: head" in layers[BLOCKS]
    times = details["autotune"]["microseconds"]
    assert times["32 x 64, 1 row"] == {DYNAMIC: 2.0, BLOCKS: 1.0, "chosen": BLOCKS}
    assert times[f"32 x 64, {length} rows"]["chosen"] == DYNAMIC
    assert (details["autotune"]["batch_sizes"], details["autotune"]["threads"]) == ([1], 1)
    beams = {"batch_sizes": [2], "num_beams": 3}  # all of them are rows of a step
    beam_details = export(coded, tmp_path / "more", autotune=beams, threads=2).details["autotune"]
    assert set(beam_details["layers"]) == {DYNAMIC}
    assert "32 x 64, 6 rows" in beam_details["microseconds"]
    assert (beam_details["batch_sizes"], beam_details["threads"]) == ([2], 2)


def test_operator_slower_at_any_batch_size_is_not_exported(coded, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "measure_variants", few_rows_are_for_blocks)
    details = export(coded, tmp_path / "out", autotune={"batch_sizes": [1, 8]}).details
    assert set(details["autotune"]["layers"]) == {DYNAMIC}
    times = details["autotune"]["microseconds"]["32 x 64, 1/8 rows"]
    assert times == {DYNAMIC: 2.0 + 16.0, BLOCKS: 1.0 + 24.0, "chosen": DYNAMIC}


def test_shortlist_head_keeps_gatherable_operator(coded, tmp_path, monkeypatch):
    from smelt.compress.shortlist import ShortlistSettings, ShortlistStage

    monkeypatch.setattr(autotune, "measure_variants", lambda *_: {DYNAMIC: 2.0, BLOCKS: 1.0})
    settings = ShortlistSettings(frequent_tokens=4)
    shortlist_folder = every_family.run_stage(
        ShortlistStage(), settings, coded, "marian", tmp_path / "listed"
    ).out
    details = export(shortlist_folder, tmp_path / "out", autotune=True).details
    assert details["graphs"]["decoder_with_past_model"]["operators"][DYNAMIC] == 1  # the head
    assert not any("head" in name for names in details["autotune"]["layers"].values() for name in names)


def test_operators_tuned_for_other_thread_count_are_reported(coded, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "measure_variants", few_rows_are_for_blocks)
    monkeypatch.setattr("smelt.export.autotune.measure_threads", lambda *_: (2, {}))
    warnings = export(coded, tmp_path / "out", autotune=True, threads="autotune").warnings
    assert "tuned-for-other-threads" in message_codes(warnings)
    monkeypatch.setattr("smelt.export.autotune.available_cores", lambda: 2)
    warnings = export(coded, tmp_path / "more", threads=3).warnings
    assert "more-threads-than-cores" in message_codes(warnings)


def test_parity_reference_uses_chosen_operators(coded, tmp_path, monkeypatch):
    """Without that the two forms differ by what rounding activations does."""
    monkeypatch.setattr(autotune, "measure_variants", lambda *_: {DYNAMIC: 2.0, BLOCKS: 1.0})
    calls = []
    original = check_parity.check_exported_graphs
    monkeypatch.setattr(
        check_parity, "check_exported_graphs", lambda *args: calls.append(args) or original(*args)
    )
    untuned = export(coded, tmp_path / "plain")
    tuned = export(coded, tmp_path / "tuned", autotune=True)
    (_, plain_reference), (_, tuned_reference) = calls
    assert (plain_reference.tokens == tuned_reference.tokens).all()
    tuned_difference = tuned.details["parity"]["decoder_with_past_model"]["mean"]
    relative_difference = (
        abs(plain_reference.logits - tuned_reference.logits).mean() / plain_reference.logits.std()
    )
    assert tuned_difference < relative_difference / 3
    assert untuned.details["parity"]["decoder_with_past_model"]["mean"] < 0.05
    # head and embedding are one constant
    graph = onnx.load(tuned.out / "decoder_with_past_model.onnx").graph
    (head,) = [n for n in graph.node if n.op_type == BLOCKS and n.input[1].startswith("head.")]
    assert [n.op_type for n in graph.node if head.input[1] in n.input] == ["Gather", BLOCKS]
    num_rows = next(t.dims[0] for t in graph.initializer if t.name == head.input[1])
    assert [
        t.name for t in graph.initializer if len(t.dims) > 1 and num_rows in t.dims[:2] and t.dims[-1] > 8
    ] == [head.input[1]]


def test_model_without_tunable_layers_gets_warning(tmp_path):
    source = write_translator(tmp_path / "model")
    ctx = export(source, tmp_path / "out", autotune=True)
    assert "nothing-to-tune" in message_codes(ctx.warnings)
    assert ctx.details["autotune"]["layers"] == {}


def test_every_variant_of_every_shape_is_measured(coded, monkeypatch):
    monkeypatch.setattr(autotune, "_OPERATOR_ROUND_SECONDS", 0)
    monkeypatch.setattr(autotune, "_MAX_BYTES", 5000)
    autotune.measure_variants.cache_clear()
    model, _ = load_model(coded)
    graphs = model_graphs(model)
    details = choose_variants(graphs, {"encoder_model": [6], "decoder_with_past_model": [1]}, threads=1)
    autotune.measure_variants.cache_clear()
    assert all(times[DYNAMIC] > 0 < times[BLOCKS] for times in details["microseconds"].values())
    assert {m.matrix.variant for g in graphs for _, m in quantized_layers(g.module)} <= {DYNAMIC, BLOCKS}


def test_autotune_requires_onnx_runtime_on_cpu():
    with raises_setting_codes("unused-setting"):
        OnnxSettings(target="tensorrt", autotune=True)


NBITS = {bits: f"MatMulNBits, {bits} bits" for bits in (2, 4, 8)}
FORMS = {
    ("int8-groupwise", 4): (8,), ("int4", 4): (4, 8), ("int3", 4): (4, 8), ("int2", 4): (2, 4, 8),
    ("ternary", 4): (2, 4, 8), ("binary", 4): (2, 4, 8), ("int4", 0): (4,), ("int2", 0): (4,),
    ("ternary", 0): (4,), ("binary", 0): (4,),
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "level"), FORMS)
def test_variants_include_own_and_wider_bit_widths(scheme, level):
    variants = find_scheme(scheme).operator_variants(
        default_options(find_scheme(scheme)) | {"accuracy_level": level}
    )
    assert variants == tuple(NBITS[bits] for bits in FORMS[scheme, level])


def as_fast_as(bits):
    """Of all forms this one is the fastest."""

    def measured(scheme, options, *_):
        forms = find_scheme(scheme).operator_variants(dict(options))
        return {form: 1.0 if form == NBITS[bits] else 2.0 for form in forms}

    return measured


CODES = [
    (2, {"scheme": "int2", "group_size": 32, "symmetric": False}),
    (8, {"scheme": "int4", "group_size": 16, "symmetric": False}),
    (2, {"scheme": "ternary", "granularity": "channel", "group_size": 32, "embedding_scheme": "ternary"}),
    (4, {"scheme": "binary", "group_size": 32, "embedding_scheme": "int2"}),
    (8, {"scheme": "int3", "group_size": 32, "symmetric": False, "embedding_scheme": "int3"}),
]


@pytest.mark.parametrize(("bits", "settings"), CODES, ids=str)
def test_every_bit_width_stores_equal_values(bits, settings, tmp_path, monkeypatch):
    """The export compares each operator, each constant and the whole graph with torch."""
    monkeypatch.setattr(autotune, "measure_variants", as_fast_as(bits))
    task = "language-modeling"
    source = causal.write_model(tmp_path / "model", "gpt2", n_embd=64, n_layer=1)
    graph_exports.randomize_biases(source)
    codes = every_family.run_stage(
        Quantize(), QuantizeSettings(**settings), source, "gpt2", tmp_path / "codes"
    ).out
    ctx = export(codes, tmp_path / "out", task, autotune=True)
    model = onnx.load(ctx.out / "model.onnx")
    widths = {
        next(a.i for a in node.attribute if a.name == "bits")
        for node in model.graph.node
        if node.op_type == BLOCKS
    }
    assert bits in widths
    assert NBITS[bits] in ctx.details["autotune"]["layers"]
    if bits < 8:
        return
    plain_model = onnx.load(export(codes, tmp_path / "plain", task).out / "model.onnx")
    tuned_values, as_it_was = (
        {t.name: t.dims for t in graph.initializer if t.name.endswith((".codes", ".highs"))}
        for graph in (model.graph, plain_model.graph)
    )
    assert tuned_values == as_it_was  # the file keeps the small codes


def test_schemes_slower_than_int8_are_reported(tmp_path, monkeypatch):
    source = write_translator(tmp_path / "model")
    harness.run_stage(Quantize(), QuantizeSettings(scheme="int4"), source, tmp_path / "codes")
    for duration, warned in ((0.9, True), (0.97, False)):  # times vary by more than 0.03
        monkeypatch.setattr(
            autotune,
            "measure_variants",
            lambda scheme, *_, took=duration: (
                {DYNAMIC: took} if scheme == "int8-dynamic" else {NBITS[4]: 1.0, NBITS[8]: 1.2}
            ),
        )
        ctx = export(
            tmp_path / "codes", tmp_path / f"out-{warned}", autotune={"batch_sizes": [8], "num_beams": 2}
        )
        messages = [warning.message for warning in ctx.warnings if warning.code == "slower-than-default"]
        assert bool(messages) is warned
        if warned:
            assert re.findall(r"[\d.]+", messages[0])[:2] == ["8", "2"]  # texts and beams
            assert re.findall(r"1\.11 \D+? (\w+_model) \(", messages[0]) == [
                "encoder_model", "decoder_with_past_model",
            ]  # fmt: skip
        shape = next(iter(ctx.details["autotune"]["microseconds"].values()))
        assert shape.keys() == {NBITS[4], NBITS[8], "chosen", "int8-dynamic"}
        assert shape["chosen"] == NBITS[4]


def test_shape_with_two_schemes_is_reported_per_scheme(tmp_path, monkeypatch):
    source = write_translator(tmp_path / "model")
    settings = QuantizeSettings(scheme="int4", group_size=32, embedding_scheme="int8-groupwise")
    harness.run_stage(Quantize(), settings, source, tmp_path / "codes")
    model, _ = load_model(tmp_path / "codes")
    monkeypatch.setattr(autotune, "measure_variants", as_fast_as(8))
    row_counts = {"encoder_model": [1], "decoder_with_past_model": [1]}
    graphs = model_graphs(model)
    monkeypatch.setattr(autotune.MeasuredMatrix, "shape", "the same")
    microseconds = choose_variants(graphs, row_counts, threads=1)["microseconds"]
    assert microseconds.keys() == {"the same, int4", "the same, int8-groupwise"}
    assert microseconds["the same, int4"].keys() == {NBITS[4], NBITS[8], "chosen", "int8-dynamic"}


def test_single_operator_scheme_is_compared_with_int8(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "_OPERATOR_ROUND_SECONDS", 0)
    source = write_translator(tmp_path / "model")
    harness.run_stage(Quantize(), QuantizeSettings(scheme="int8-groupwise"), source, tmp_path / "codes")
    ctx = export(tmp_path / "codes", tmp_path / "out", autotune=True)
    assert "nothing-to-tune" in message_codes(ctx.warnings)
    by_graph = ctx.details["autotune"]["microseconds_by_graph"]
    assert by_graph.keys() == ctx.details["graphs"].keys()
    assert all(
        microseconds["chosen"] > 0 < microseconds["int8-dynamic"] for microseconds in by_graph.values()
    )
