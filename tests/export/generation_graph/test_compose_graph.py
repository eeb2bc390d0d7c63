"""One graph from input_ids to sequences says what Hugging Face `generate` says, token for token."""

import json
import os
import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from smelt.export.generation_graph.write import write_generation_graphs
from smelt.export.graphs.export_graph import export_graph, model_graphs
from smelt.export.remove_padding import remove_padding
from smelt.export.simplify_graph import expand_placeholders
from smelt.generation import search
from smelt.models.checkpoint import load_model
from smelt.runtimes.registry import open_folder
from tests.support.models import generation_models
from tests.support.pairs import matrix

KINDS = ("marian", "t5", "gpt2", "opt", "llama") if matrix.is_full_matrix() else ("marian", "gpt2", "llama")
# Of each family; `make bench` draws more, of all eight.
DRAWS = int(os.environ.get("SMELT_GENERATION_DRAWS", "6"))
DRAWN = (
    [*generation_models.SEQ2SEQ, *generation_models.CAUSAL]
    if "SMELT_GENERATION_DRAWS" in os.environ
    else KINDS
)


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    """By kind a runner over the graphs of a random model, whose steps nobody may ask for."""
    runner_by_kind = {kind: _runner(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    yield runner_by_kind
    for runner in runner_by_kind.values():
        runner.close()


def _runner(kind, home):
    folder = generation_models.write_model(kind, home)
    for graph in model_graphs(load_model(folder)[0]):
        model = export_graph(graph, "ort-cpu", 20)
        expand_placeholders(model)
        remove_padding(model)
        onnx.save(model, folder / f"{graph.name}.onnx")
    write_generation_graphs(
        folder,
        ["model"] if kind in generation_models.CAUSAL else ["encoder_model", "decoder_with_past_model"],
    )
    return open_folder(folder, "onnx", "ort-cpu", 1)


@pytest.mark.parametrize("settings", ["GREEDY_CASES", "BEAM_CASES"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_graph_equals_generate(runners, kind, settings, monkeypatch):
    model, runner = generation_models.make_model(kind), runners[kind]
    calls = []
    original = runner.generate_sequences
    monkeypatch.setattr(runner, "generate_sequences", lambda *args: calls.append(args) or original(*args))
    ended = differ = 0
    for case_index, (settings_case, config) in enumerate(getattr(generation_models, settings)):
        for batch_size in (1, 6):
            batch = generation_models.random_batch(
                batch_size, seed=10 * case_index + batch_size, left=kind in generation_models.CAUSAL
            )
            graph_tokens, expected_tokens = generation_models.compare_tokens(
                runner, model, batch, settings_case, config
            )
            assert graph_tokens == expected_tokens, (settings_case, config, batch_size)
            ended += sum(len(row) < 12 for row in graph_tokens)
            differ += len({tuple(row) for row in graph_tokens}) > 1
    assert ended >= 6, "hardly any text ended before the limit: the test shows nothing"
    assert differ >= 6, "every text gave the same tokens: the test shows nothing"
    # bad words of several tokens, and what replaces scores that are no numbers, are left to Python
    expected = [search.graph_supports(_decoding(w | c)) for w, c in getattr(generation_models, settings)]
    assert len(calls) == 2 * sum(expected) > 10


def test_ngram_size_above_text_length_bans_no_token(runners):
    model, batch = generation_models.make_model("marian"), generation_models.random_batch(2, seed=3)
    generation = {"no_repeat_ngram_size": 5}
    graph_tokens, expected_tokens = generation_models.compare_tokens(
        runners["marian"], model, batch, generation, {}
    )
    assert graph_tokens == expected_tokens


@pytest.mark.parametrize("kind", DRAWN)
def test_random_settings_equal_generate(kind, runners, tmp_path, monkeypatch):
    """In torch, in the loop in Python over graphs, and in the graph of the whole loop."""
    model, graphs = generation_models.make_model(kind), runners.get(kind) or _runner(kind, tmp_path)
    eager = open_folder(graphs.folder, "torch", None, 1)
    for draw_index in range(DRAWS):
        draw = random.Random(f"{kind} {draw_index}")
        generation, config = generation_models.random_settings(draw)
        batch = generation_models.random_batch(
            draw.randint(1, 5), draw_index, left=kind in generation_models.CAUSAL
        )
        token_ids = {}
        for name, runner in (("torch", eager), ("graph", graphs)):
            token_ids[name], expected = generation_models.compare_tokens(
                runner, model, batch, generation, config
            )
        with monkeypatch.context() as patch:
            patch.setattr(search, "graph_supports", lambda decoding: False)
            token_ids["loop"], _ = generation_models.compare_tokens(graphs, model, batch, generation, config)
        for name, texts in token_ids.items():
            assert texts == expected, (name, draw_index, generation, config)


@pytest.mark.parametrize("graph", ["generate", "generate_beams"])
@pytest.mark.parametrize("kind", ["marian", "gpt2"])
def test_empty_batch_returns_empty_sequences(runners, kind, graph):
    session = onnxruntime.InferenceSession(runners[kind].folder / f"{graph}.onnx")
    none = np.zeros((0, 5), np.int64)
    (sequences,) = session.run(["sequences"], {"input_ids": none, "attention_mask": none})
    assert sequences.shape == (0, 5 if kind in generation_models.CAUSAL else 1)


def _decoding(asked):
    """Return a `Decoding` with what a graph might not do."""
    left_to_python = ("bad_words_ids", "remove_invalid_values")
    return search.GenerationConfig(**{name: asked[name] for name in left_to_python if name in asked})


@pytest.mark.parametrize("kind", ["marian", "llama"])
def test_generation_graph_requires_only_token_inputs(runners, kind):
    """Whoever opens it without smelt gets what the model's own generation config asks for."""
    runner, model = runners[kind], generation_models.make_model(kind)
    session = onnxruntime.InferenceSession(runner.folder / "generate.onnx")
    batch = generation_models.random_batch(5, seed=1, left=kind in generation_models.CAUSAL)
    feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    assert {i.name for i in session.get_inputs()} == set(feeds)
    (sequences,) = session.run(["sequences"], {**feeds, "max_new_tokens": np.array(9)})
    ends = np.array([generation_models.EOS, 10**6])  # and one that is no token
    (with_eos,) = session.run(["sequences"], {**feeds, "max_new_tokens": np.array(9), "eos_token_ids": ends})
    assert (with_eos == sequences).all()
    prompt = 1 if kind == "marian" else batch.input_ids.shape[1]
    assert sequences.shape[1] <= prompt + 9
    trimmed = [search.trim_at_eos(row, prompt, [generation_models.EOS]) for row in sequences]
    assert trimmed == generation_models.transformers_tokens(
        model, batch, max_new_tokens=9, do_sample=False, num_beams=1
    )


@pytest.mark.parametrize(
    ("wishes", "search"),
    [({}, "ArgMax"), ({"num_beams": 3, "early_stopping": True}, "LogSoftmax")],
    ids=["greedy", "beams"],
)
@pytest.mark.parametrize("kind", ["gpt2", "marian"])
def test_finished_rows_leave_batch_and_keep_output_order(
    runners, kind, wishes, search, monkeypatch, tmp_path
):
    """What a row says does not depend on when the others end, and all are where they were."""
    batch, calls = generation_models.random_batch(9, seed=5, left=kind == "gpt2"), []
    runner, config = runners[kind], {"eos_token_id": [1, 5, 9, 11, 13, 15]}
    monkeypatch.setattr(runner, "generate_sequences", lambda *args: calls.append(args) or original(*args))
    original = type(runner).generate_sequences.__get__(runner)
    together, expected_tokens = generation_models.compare_tokens(
        runner, generation_models.make_model(kind), batch, wishes, config
    )
    assert together == expected_tokens
    ((name, _, feeds),) = calls
    all_feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **feeds}
    steps = _sentences_of(runner.folder / f"{name}.onnx", all_feeds, search, tmp_path)
    assert steps[0] == 9
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) >= 3, steps  # so rows left at different times
    assert steps[-1] <= 3


def _sentences_of(path, inputs, operator, folder):
    """Return how many sentences each run of an operator has got, by ONNX Runtime's profile."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = onnxruntime.InferenceSession(path, options)
    session.run(["sequences"], inputs)
    events = json.loads(Path(session.end_profiling()).read_text())
    runs = sorted((e for e in events if e["cat"] == "Node"), key=lambda e: e["ts"])
    shapes = [e["args"]["input_type_shape"] for e in runs if e["args"].get("op_name") == operator]
    return [next(iter(shape[0].values()))[0] for shape in shapes]


@pytest.mark.parametrize("kind", ["marian", "gpt2"])
def test_steps_of_beams_look_up_penalties_and_branch_once(runners, kind):
    """A step of one sentence costs what its nodes cost: what all steps share is computed before the loop."""
    graph = onnx.load(runners[kind].folder / "generate_beams.onnx", load_external_data=False).graph
    for _ in range(2):
        (loop,) = [node for node in graph.node if node.op_type == "Loop"]
        (graph,) = [attribute.g for attribute in loop.attribute]
    operators = [node.op_type for node in graph.node]
    assert operators.count("If") == 1
    assert "Pow" not in operators
    assert operators.count("TopK") == 2  # the beams that continue, and the finished texts


@pytest.mark.parametrize("kind", ["marian", "gpt2"])
@pytest.mark.parametrize("name", ["generate", "generate_beams"])
def test_constants_are_at_most_one_level_above_their_readers(runners, kind, name):
    """ONNX Runtime packs none that do: a step then takes twice as long."""
    model = onnx.load(runners[kind].folder / f"{name}.onnx", load_external_data=False)
    seen = 0

    def look(graph, around):
        nonlocal seen
        options = {i.name for i in graph.input}  # an input that has a default is no constant
        levels = [*around, {t.name for t in graph.initializer if np.prod(t.dims) >= 64} - options]
        for node in graph.node:
            for outer_names in levels[:-2]:
                assert not outer_names & set(node.input), node.name
            seen += bool(levels[-1] & set(node.input))
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    look(attribute.g, levels)

    look(model.graph, [])
    assert seen > 10


def test_translator_graphs_share_one_weight_file(runners):
    folder = runners["marian"].folder
    names = sorted(path.name for path in folder.iterdir() if "onnx" in path.name)
    assert names == [
        "decoder_with_past_model.onnx", "encoder_model.onnx", "generate.onnx", "generate_beams.onnx",
        "model.onnx_data",
    ]  # fmt: skip
