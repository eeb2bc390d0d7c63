"""One attention for all beams of a sentence, against one attention for each beam with its own cache."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from smelt.export.generation_graph.beam_attention import (
    MAX_JOINT_BEAMS,
    BeamQueries,
    cached_lengths,
    first_table,
    keep_read_keys,
    next_table,
    own_keys,
)
from smelt.export.generation_graph.graph_builder import GraphBuilder, value_info
from smelt.export.generation_graph.write import compose_generation_graph
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.runner import read_model_files
from smelt.generation.search import generation_feeds
from tests.support.graphs import graph_exports

HEADS, HEAD_WIDTH = 2, 4
WIDTH = HEADS * HEAD_WIDTH


def run(b, outputs, feeds):
    """Run the graph of `b`, whose inputs are `feeds`; return the outputs, whose type is float32."""
    inputs = [value_info(name, array.dtype, [None] * array.ndim) for name, array in feeds.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = b.graph("beams", inputs, results)
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(outputs, feeds)


def table_of(*rows):
    """Return float32 rows that are 0 where a row has 1, else -inf."""
    return np.where(np.array(rows) == 1, 0, -np.inf).astype(np.float32)


def test_later_step_reads_keys_of_parents_and_own_new_key():
    """The table of the first step has one row and one key."""
    b = GraphBuilder()
    own_table = own_keys(b, b.const([2]), b.const([3]))
    second = next_table(b, first_table(b, b.const([2])), b.const(np.zeros((2, 3))), own_table)
    later = next_table(b, "earlier", "parents", own_table)
    earlier = table_of([[1, 0], [1, 1], [0, 1]], [[1, 1], [1, 1], [1, 0]])
    parents = np.array([[2, 0, 2], [1, 2, 0]])
    second_table, later_table = run(b, [second, later], {"earlier": earlier[:, None], "parents": parents})
    new_rows = table_of([1, 0, 0], [0, 1, 0], [0, 0, 1])
    np.testing.assert_array_equal(second_table[0, 0], np.hstack([np.zeros((3, 1)), new_rows]))
    expected = [np.hstack([earlier[i, parents[i]], new_rows]) for i in range(2)]
    np.testing.assert_array_equal(later_table[:, 0], expected)


@pytest.mark.parametrize("sentences", [[2, 0], [1], []])
def test_keys_that_no_beam_reads_are_dropped(sentences):
    generator = np.random.default_rng(0)
    table = table_of(
        [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]], [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
        [[1, 1, 0, 1, 0], [1, 1, 0, 0, 1]],
    )  # fmt: skip
    caches = [generator.normal(size=(3, heads, 5, 2)).astype(np.float32) for heads in (2, 2, 1)]
    b = GraphBuilder()
    names = keep_read_keys(b, "table", ["c0", "c1", "c2"], [2, 2, 1], "sentences")
    feeds = {f"c{index}": cache for index, cache in enumerate(caches)}
    new_rows = np.broadcast_to(table_of([1, 0], [0, 1]), (3, 2, 2))
    with_own = np.concatenate([table, new_rows], axis=2)[:, None]
    feeds |= {"table": with_own, "sentences": np.array(sentences, np.int64)}
    next_step, *kept_caches = run(b, names, feeds)
    kept_table, kept_own = next_step[:, 0, :, :-2], next_step[:, 0, :, -2:]
    np.testing.assert_array_equal(kept_own, new_rows[sentences])
    most = max([(table[i] == 0).any(axis=0).sum() for i in sentences], default=0)
    assert kept_table.shape == (len(sentences), 2, most)
    for row, sentence in enumerate(sentences):
        for beam in range(2):
            before, after = table[sentence, beam] == 0, kept_table[row, beam] == 0
            for cache, kept_cache in zip(caches, kept_caches, strict=True):
                np.testing.assert_array_equal(kept_cache[row][:, after], cache[sentence][:, before])
    assert [cache.shape for cache in kept_caches] == [(len(sentences), heads, most, 2) for heads in (2, 2, 1)]


def attention_step(b, split):
    """Append attention [R, 1, W] with caches as in a decoder's step; return its result and new caches."""
    inputs = b.ops("Split", "qkv", outputs=3, axis=-1, num_outputs=3) if split else ["q", "k", "v"]
    names = ["attended", "present_key", "present_value"]
    b.nodes.append(
        helper.make_node(
            "MultiHeadAttention",
            [*inputs, "", "", "", "past_key", "past_value"],
            names,
            domain="com.microsoft",
            num_heads=HEADS,
        )
    )
    return [b.op("Reshape", "attended", b.const([-1, WIDTH])), *names[1:]]


@pytest.mark.parametrize("split", [True, False])
def test_attention_over_shared_cache_equals_attention_of_each_beam(split):
    generator = np.random.default_rng(0)
    sentences, beams, steps = 2, 3, 4
    shared = generator.normal(size=(2, sentences, HEADS, beams * steps, HEAD_WIDTH)).astype(np.float32)
    # step s of a text was computed by the beam of this index
    sources = generator.integers(0, beams, (sentences, beams, steps))
    read = sources + beams * np.arange(steps)
    table = np.full((sentences, beams, beams * steps), -np.inf, np.float32)
    np.put_along_axis(table, read, 0, axis=2)
    # by beam: [2, R, H, steps, d]
    beam_caches = np.stack(
        [shared[:, s][:, :, read[s, n]] for s in range(sentences) for n in range(beams)], axis=1
    )
    tokens = generator.normal(size=(sentences * beams, 1, 3 * WIDTH)).astype(np.float32)
    feeds = {"qkv": tokens} if split else dict(zip("qkv", np.split(tokens, 3, axis=2), strict=True))
    by_row = GraphBuilder()
    expected, expected_key, _ = run(
        by_row,
        attention_step(by_row, split),
        {**feeds, "past_key": beam_caches[0], "past_value": beam_caches[1]},
    )
    root = GraphBuilder()
    names = attention_step(root, split)
    queries = BeamQueries(root, root, "batch")
    # what BeamQueries appends to the outer graph comes first, as where the step is a loop's body
    step_nodes = list(root.nodes)
    root.nodes.clear()
    queries._shape(WIDTH), queries._shape(3 * WIDTH), root.const([-1, 1, WIDTH])
    now = next_table(root, "table", "parents", own_keys(root, "batch", "beams"))
    root.nodes.extend(step_nodes)
    queries.share_caches({"past_key": WIDTH}, now)
    queries.merge_reshapes()
    sizes = {"batch": np.array([sentences]), "beams": np.array([beams]), "table": table[:, None]}
    sizes["parents"] = np.tile(np.arange(beams), (sentences, 1))
    caches = {"past_key": shared[0], "past_value": shared[1]}
    attended, key, _ = run(root, names, {**feeds, **sizes, **caches})
    np.testing.assert_allclose(attended, expected, rtol=1e-5, atol=1e-6)
    new_keys = key[:, :, beams * steps :].transpose(0, 2, 1, 3).reshape(-1, HEADS, HEAD_WIDTH)
    np.testing.assert_array_equal(new_keys, expected_key[:, :, -1])


def step_graph(nodes, outputs=("logits", "present")):
    """Return an onnx.GraphProto with input `past` and these nodes (operator, inputs, outputs, attributes)."""
    return helper.make_graph(
        [helper.make_node(kind, inputs, names, **attributes) for kind, inputs, names, attributes in nodes],
        "step",
        [],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )


ATTENTION = ("MultiHeadAttention", ["q", "k", "v", "", "", "", "past", "past_v"], ["y", "present"], {})


@pytest.mark.parametrize(
    ("nodes", "lengths"),
    [
        ([("Shape", ["past"], ["length"], {"start": 2, "end": 3}), ATTENTION], ["length"]),
        ([("Shape", ["past"], ["shape"], {}), ATTENTION], None),
        ([("MultiHeadAttention", [*ATTENTION[1][:5], "bias", *ATTENTION[1][6:]], *ATTENTION[2:])], None),
        ([("MultiHeadAttention", [*ATTENTION[1][:4], "mask", *ATTENTION[1][5:]], *ATTENTION[2:])], None),
        ([(*ATTENTION[:3], {"unidirectional": 1})], None),
        ([(*ATTENTION[:2], ["y", "keys"], {})], None),
        ([("Identity", ["past"], ["copy"], {}), ATTENTION], None),
    ],
    ids=["length", "whole shape", "bias", "mask", "causal", "other output", "other reader"],
)
def test_caches_are_shared_only_if_attention_alone_reads_them(nodes, lengths):
    assert cached_lengths(step_graph(nodes), ["past", "past_v"]) == lengths


@pytest.mark.parametrize(
    ("family", "num_beams", "reorders"),
    [("marian", 4, False), ("marian", MAX_JOINT_BEAMS + 1, True), ("t5", 4, True)],
)
def test_steps_reorder_no_caches_up_to_a_number_of_beams(family, num_beams, reorders):
    """T5 adds a bias for the distance of each key to the scores, so its caches are of single rows."""
    folder = graph_exports.exported_graphs(family, "fp32").folder
    graphs = [
        onnx.load(folder / f"{name}.onnx", load_external_data=False)
        for name in ("encoder_model", "decoder_with_past_model")
    ]
    model = read_model_files(folder)
    decoding = resolve_generation(GenerationSettings(num_beams=num_beams), model)
    defaults = generation_feeds(decoding, 1, int(model.config["vocab_size"]))
    graph = compose_generation_graph(*graphs, defaults, beams=True).graph
    for _ in range(2):
        (loop,) = [node for node in graph.node if node.op_type == "Loop"]
        (graph,) = [attribute.g for attribute in loop.attribute]
    caches = {name for node in graph.node for name in node.output if ".present." in name}
    assert len(caches) >= 4
    gathered = [node.input[0] for node in graph.node if node.op_type == "Gather" and node.input[0] in caches]
    assert len(gathered) == (len(caches) if reorders else 0)
