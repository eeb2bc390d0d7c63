"""Compose the generation graphs from the graphs of one step, write them, and compare them with Python's loop.

Greedy search is here, as loops of a graph with the same steps as `smelt.generation.search`; beam search is in
beam_search_graph.py.

Shapes: B = rows at first, R = rows of a step, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import ParityError
from smelt.export.generation_graph.beam_attention import MAX_JOINT_BEAMS
from smelt.export.generation_graph.beam_search_graph import BEAM_SEARCH_INPUTS, add_beam_search
from smelt.export.generation_graph.graph_builder import (
    GENERATION_INPUTS,
    GraphBuilder,
    GraphLevel,
    LoopCarried,
    RuleTables,
    StepRule,
    add_to_logits,
    apply_history_rules,
    argmax,
    biases_with_forced_tokens,
    blocked_argmax,
    is_eos,
    prepare_rules,
    scatter_to_vocabulary,
    step_rule,
    use_blocks,
    value_info,
)
from smelt.export.generation_graph.step_model import DecoderOnlyModel, EncoderDecoderModel, StepModel
from smelt.export.graph_files import read_graph, share_weights
from smelt.export.parity.check_parity import ExportedModel
from smelt.export.parity.references import make_dequantized_copy
from smelt.generation.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH, Batch
from smelt.generation.config import GenerationConfig, GenerationSettings, resolve_generation
from smelt.generation.runner import read_model_files
from smelt.generation.search import generate_resolved, generation_feeds, graph_supports, run_generation_graph
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.runtimes.registry import open_folder
from smelt.stage import Context


def add_greedy_search(root: GraphLevel, source: StepModel, vocabulary: int) -> str:
    """Append greedy search; return int64 [B, T], each row's prompt and new tokens, padded after its end.

    Rows that have ended are removed from the batch once they are a quarter of it: gathering the caches of the
    others costs about as much as one step of a row. So there are two loops: the outer one runs once for each
    composition of the batch.
    """
    b = root.builder
    rules, token_ids = prepare_rules(b, vocabulary), source.shortlist_ids
    rule_rows = (
        b.op("Gather", "rule_biases", token_ids, axis=1)
        if token_ids
        else biases_with_forced_tokens(b, vocabulary)
    )
    count = b.op("Squeeze", b.row_count(source.source), b.const([0]))
    text_indices = b.op("Range", b.const(0), count, b.const(1))
    state_values = [*source.caches, *source.extra_state]
    loop_values = [
        LoopCarried("step", b.const(0), np.int64, ()),
        LoopCarried("all_texts", source.prompt, np.int64, (None, None)),
        LoopCarried("places", text_indices, np.int64, (None,)),
        LoopCarried("texts", source.prompt, np.int64, (None, None)),
        LoopCarried("ids", source.ids, np.int64, (None, None)),
        *source.shared,
        *state_values,
    ]

    def phase(b: GraphBuilder, unused: str, names: list[str]) -> tuple[str, list[str]]:
        step, all_texts, text_indices, texts, ids, *carried_values = names
        shared, state = carried_values[: len(source.shared)], carried_values[len(source.shared) :]
        levels = [root, GraphLevel(b)]
        search = _GreedySearchValues(levels, source, vocabulary, rules, rule_rows)
        next_step, texts, ids, done, state = _add_inner_loop(search, step, texts, ids, shared, state)
        new_tokens = b.op("Sub", b.dimension(texts, 1), b.dimension(all_texts, 1))
        block = b.op("Concat", b.row_count(all_texts), b.op("Unsqueeze", new_tokens, b.const([0])), axis=0)
        padded = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
        all_texts = b.op("ScatterND", padded, b.op("Unsqueeze", text_indices, b.const([1])), texts)
        unfinished = b.op("Squeeze", b.op("NonZero", b.op("Not", done)), b.const([0]))
        next_values = [
            b.op("Gather", name, unfinished, axis=0) for name in (text_indices, texts, ids, *shared, *state)
        ]
        any_unfinished = b.op("Greater", b.op("Squeeze", b.row_count(unfinished), b.const([0])), b.const(0))
        should_continue = b.op("And", any_unfinished, b.op("Less", next_step, "max_new_tokens"))
        return should_continue, [next_step, all_texts, *next_values]

    # attention and reshapes fail on a batch without rows, so it runs no step
    max_trips = b.op("Mul", "max_new_tokens", b.op("Min", count, b.const(1)))
    return b.loop("phases", max_trips, loop_values, phase)[1]


@dataclass(frozen=True)
class _GreedySearchValues:
    """Values that are constant over the steps. levels: the graphs around the steps. rule_biases: of rules.

    Biases also force tokens, except with a shortlist, where they cover only its tokens.
    """

    levels: list[GraphLevel]
    source: StepModel
    vocabulary: int
    rules: RuleTables
    rule_biases: str


def _add_inner_loop(
    search: _GreedySearchValues, step: str, texts: str, ids: str, shared: Sequence[str], state: Sequence[str]
) -> tuple[str, str, str, str, list[str]]:
    """Append the inner loop; return the number of the next step, texts, ids, which rows ended, and state."""
    levels, source = search.levels, search.source
    b = levels[-1].builder
    batch_size = b.row_count(texts)
    none = b.op("Expand", b.const([[False]], np.bool_), b.op("Concat", batch_size, b.const([1]), axis=0))
    # when only this many rows remain, the others are removed
    quarter = b.op("Max", b.op("Div", batch_size, b.const([4])), b.const([1]))
    min_finished = b.op("Squeeze", quarter, b.const([0]))
    is_large_batch = use_blocks(b, batch_size, search.vocabulary)
    is_plain_search = b.op("Not", b.op("Or", "text_rules", is_large_batch))
    loop_values = [
        LoopCarried("texts", texts, np.int64, (None, None)),
        LoopCarried("ids", ids, np.int64, (None, None)),
        LoopCarried("done", none, np.bool_, (None, 1)),
        *(
            LoopCarried(value.name, name, value.dtype, value.shape)
            for value, name in zip([*source.caches, *source.extra_state], state, strict=True)
        ),
    ]

    def body(b: GraphBuilder, count: str, names: list[str]) -> tuple[str, list[str]]:
        texts, ids, done, *carried_values = names
        caches, extra_state = carried_values[: len(source.caches)], carried_values[len(source.caches) :]
        rule = step_rule(b, search.rules, b.op("Add", count, step), search.rule_biases)
        step_outputs = source.add_step(
            [*levels, GraphLevel(b)], ids, caches, extra_state, (1, shared), beams=None
        )
        scores = add_to_logits(b, step_outputs.logits, rule.biases)
        mask = extra_state[0] if source.mask else None
        if source.shortlist_ids:
            best = _next_tokens_from_shortlist(b, search, scores, texts, rule)
        else:
            best = b.if_else(
                is_plain_search, lambda i: argmax(i, scores),
                lambda i: _next_tokens_by_rules(i, search, scores, texts, mask, rule), np.int64, (None, 1),
            )  # fmt: skip
        ids = b.op("Where", done, "pad_token_id", best)
        done = b.op("Or", done, is_eos(b, search.rules, best))
        num_finished = b.op("ReduceSum", b.cast(done, np.int64), keepdims=0)
        should_continue = b.op("Less", num_finished, min_finished)
        return should_continue, [
            b.op("Concat", texts, ids, axis=1),
            ids,
            done,
            *step_outputs.caches,
            *step_outputs.extra_state,
        ]

    max_trips = b.op("Sub", "max_new_tokens", step)
    texts_after, ids, done, *final_state = b.loop("steps", max_trips, loop_values, body)
    steps_taken = b.op("Sub", b.dimension(texts_after, 1), b.dimension(texts, 1))
    return b.op("Add", step, steps_taken), texts_after, ids, b.op("Squeeze", done, b.const([1])), final_state


def _next_tokens_by_rules(
    b: GraphBuilder, search: _GreedySearchValues, scores: str, texts: str, mask: str | None, rule: StepRule
) -> str:
    """Return int64 [R, 1]: the next tokens, if rules depend on the history or there are many logits."""

    def ruled(inside: GraphBuilder) -> str:
        best = blocked_argmax(inside, apply_history_rules(inside, scores, texts, mask), search.vocabulary)
        forced_token = rule.forced_token(inside)
        return inside.op("Where", inside.op("Less", forced_token, inside.const(0)), best, forced_token)

    return b.if_else(
        "text_rules", ruled, lambda i: blocked_argmax(i, scores, search.vocabulary), np.int64, (None, 1)
    )


def _next_tokens_from_shortlist(
    b: GraphBuilder, search: _GreedySearchValues, scores: str, texts: str, rule: StepRule
) -> str:
    """Return int64 [R, 1]: the next tokens, from scores [R, C] of the shortlist's tokens only."""
    token_ids = search.source.shortlist_ids
    assert token_ids is not None

    def ruled(inside: GraphBuilder) -> str:
        every = scatter_to_vocabulary(inside, scores, token_ids, search.vocabulary)
        return blocked_argmax(inside, apply_history_rules(inside, every, texts, None), search.vocabulary)

    best = b.if_else(
        "text_rules",
        ruled,
        lambda i: i.op("Gather", token_ids, argmax(i, scores), axis=0),
        np.int64,
        (None, 1),
    )
    forced_token = rule.forced_token(b)
    return b.op("Where", b.op("Less", forced_token, b.const(0)), best, forced_token)


START_TOKEN_INPUT = "decoder_start_token_id"


def compose_generation_graph(
    encoder: Any | None,
    decoder: Any,
    defaults: Mapping[str, Any],
    beams: bool,
    shortlist: Path | None = None,
) -> Any:
    """Return the onnx.ModelProto from `input_ids` to `sequences`.

    Args:
        encoder: onnx.ModelProto of the encoder; None for a decoder-only model.
        decoder: onnx.ModelProto of one step.
        defaults: default values of optional inputs, by name.
        beams: beam search instead of greedy search.
        shortlist: the folder with the model's shortlist, if it has one.

    Raises:
        RunError: a graph cannot be part of a loop, or its output layer cannot be restricted.
    """
    from onnx import helper, numpy_helper

    versions = {item.domain: item for model in (encoder, decoder) if model for item in model.opset_import}
    b = GraphBuilder(opset=versions[""].version)
    root = GraphLevel(b)
    inputs = GENERATION_INPUTS | (BEAM_SEARCH_INPUTS if beams else {})
    vocabulary = defaults["rule_biases"].shape[1]
    source: StepModel
    if encoder is None:
        source = DecoderOnlyModel(b, decoder.graph)
    else:
        has_prompt = np.ndim(defaults[START_TOKEN_INPUT]) > 0
        inputs = inputs | {START_TOKEN_INPUT: (np.int64, ("prompt",) if has_prompt else ())}
        source = translator = EncoderDecoderModel(
            b, encoder.graph, decoder.graph, START_TOKEN_INPUT, has_prompt
        )
        if has_prompt:
            translator.add_prompt(b)
        elif beams and defaults["num_beams"] <= MAX_JOINT_BEAMS:
            translator.share_caches(b)
        if shortlist is not None:
            translator.use_shortlist(root, shortlist, vocabulary)
    sequences = (
        add_beam_search(root, source, vocabulary) if beams else add_greedy_search(root, source, vocabulary)
    )
    b.nodes.append(helper.make_node("Identity", [sequences], ["sequences"], "sequences"))
    graph_inputs = (
        [value_info(name, np.int64, ("batch", "length")) for name in ("input_ids", "attention_mask")]
        if source.source == "input_ids"
        else list(encoder.graph.input)  # type: ignore[union-attr]
    )
    for name, (dtype, shape) in inputs.items():
        graph_inputs.append(value_info(name, dtype, shape))
        b.initializers.append(numpy_helper.from_array(np.asarray(defaults[name], dtype=dtype), name))
    graph = b.graph("generate", graph_inputs, [value_info("sequences", np.int64, ("batch", "tokens"))])
    return helper.make_model(
        graph, opset_imports=list(versions.values()), ir_version=decoder.ir_version, producer_name="smelt"
    )


# New tokens in the comparison with the loop in Python
_COMPARED_TOKENS = 12
# nats; texts with a smaller difference are equally likely
_TOLERANCE = 1e-3
# beams if neither the recipe nor the model sets them
_DEFAULT_BEAMS = 4


def write_generation_graphs(folder: Path, steps: Sequence[str]) -> None:
    """Write `generate.onnx` and `generate_beams.onnx` from the graphs `steps` (names) in `folder`.

    All graphs then share one weight file.

    Args:
        folder: with the graphs, the config files of the model, and its shortlist, if it has one.
        steps: the encoder's, if there is one, and the decoder's.

    Raises:
        RunError: a graph cannot be part of a loop.
        InputError: smelt does not support a setting of the generation config.
    """
    import onnx

    share_weights([folder / f"{name}.onnx" for name in steps])
    model: Any = read_model_files(folder)
    graphs = [read_graph(folder / f"{name}.onnx", values=False) for name in steps]
    encoder, decoder = graphs if len(graphs) == 2 else (None, graphs[0])
    vocabulary = int(model.config.get("decoder_vocab_size") or model.config["vocab_size"])
    shortlist = folder if (folder / SHORTLIST).is_file() else None
    for name, beams in ((GREEDY_GRAPH, 1), (BEAM_SEARCH_GRAPH, default_num_beams(model))):
        decoding = resolve_generation(GenerationSettings(num_beams=beams), model)
        defaults = generation_feeds(decoding, len(decoding.decoder_prompt) or 1, vocabulary)
        path = folder / f"{name}.onnx"
        onnx.save(compose_generation_graph(encoder, decoder, defaults, beams > 1, shortlist), path)
        onnx.checker.check_model(str(path))


def run_generation_graphs(runner: Any, batch: Batch) -> None:
    """Run each generation graph once.

    Raises:
        ParityError: ONNX Runtime cannot run one.
    """
    for name, beams in ((GREEDY_GRAPH, 1), (BEAM_SEARCH_GRAPH, 2)):
        try:
            _generate_by_graph(
                runner,
                batch,
                resolve_generation(GenerationSettings(num_beams=beams, max_new_tokens=2), runner),
            )
        except Exception as error:  # ONNX Runtime's errors share no other base class
            raise ParityError(
                f"{name}: ONNX Runtime cannot run the exported graph: {error}",
                code="graph-failed",
                file=f"{name}.onnx",
            ) from error


def _generate_by_graph(runner: Any, batch: Batch, decoding: GenerationConfig) -> list[list[int]]:
    """Return the new tokens of each row: by the graph, unless it does not support the model's settings.

    Of a large model no other graph is open meanwhile: each holds a copy of the weights.
    """
    search = run_generation_graph if graph_supports(decoding) else generate_resolved
    runner.backend.free_large_graphs()
    return search(runner, batch, decoding)


def default_num_beams(model: Any) -> int:
    """Return the number of beams in the model's generation config, or a common number."""
    num_beams = int(model.generation_config.get("num_beams") or 1)
    return num_beams if num_beams > 1 else _DEFAULT_BEAMS


def verify_generation_graphs(runner: Any, batch: Batch) -> None:
    """Compare the outputs of the generation graphs with those of the loop in Python.

    Args:
        runner: of the folder with both; its steps compute in float32, otherwise two tokens with close scores
            may change places.
        batch: real texts.

    Raises:
        ParityError: graph, row and the first token that differs.
    """
    run_generation_graphs(runner, batch)
    for name, beams in ((GREEDY_GRAPH, 1), (BEAM_SEARCH_GRAPH, 2)):
        decoding = resolve_generation(
            GenerationSettings(num_beams=beams, max_new_tokens=_COMPARED_TOKENS), runner
        )
        expected = generate_resolved(runner, batch, decoding)
        generated = _generate_by_graph(runner, batch, decoding)
        for row, (graph_tokens, expected_tokens) in enumerate(zip(generated, expected, strict=True)):
            if graph_tokens != expected_tokens and not _equally_likely(
                runner, batch, row, (graph_tokens, expected_tokens), decoding
            ):
                first_difference = next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(graph_tokens, expected_tokens, strict=False))
                        if a != b
                    ),
                    len(graph_tokens),
                )
                raise ParityError(
                    f"{name}: row {row}: token {first_difference + 1} is "
                    f"{graph_tokens[first_difference : first_difference + 1]}, but the Python generation"
                    f" loop returned {expected_tokens[first_difference : first_difference + 1]}.",
                    code="parity-failed",
                    file=f"{name}.onnx",
                )


def _equally_likely(
    runner: Any, batch: Batch, row: int, texts: tuple[list[int], list[int]], decoding: GenerationConfig
) -> bool:
    """Return whether two texts of a row are equally likely, so that rounding decides between them.

    Greedy search differs at one token, whose score counts; beam search scores whole texts by length.
    """
    graph_tokens, expected_tokens = texts
    if decoding.num_beams == 1:
        common_length = next(
            (i for i, (a, b) in enumerate(zip(graph_tokens, expected_tokens, strict=False)) if a != b), None
        )
        if common_length is None:  # one continues where the other has ended
            return False
        graph_tokens, expected_tokens = (
            graph_tokens[: common_length + 1],
            expected_tokens[: common_length + 1],
        )
    scores = []
    for tokens in (graph_tokens, expected_tokens):
        total = _log_likelihood(runner, batch, row, tokens, decoding)
        scores.append(total / len(tokens) ** (decoding.length_penalty if decoding.num_beams > 1 else 0))
    return bool(abs(scores[0] - scores[1]) < _TOLERANCE)


def _log_likelihood(
    runner: Any, batch: Batch, row: int, tokens: Sequence[int], decoding: GenerationConfig
) -> float:
    """Return the log-likelihood of `tokens` after a row of the batch, in nats."""
    single = batch.select([row])
    state = runner.encode(single)
    *first_tokens, previous_token = decoding.decoder_prompt or [int(single.input_ids[0, -1])]
    for token in first_tokens:
        runner.decode_step(state, np.array([token]))
    total = 0.0
    for token in tokens:
        logits = runner.decode_step(state, np.array([previous_token]))[0].astype(np.float64)
        total += float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        previous_token = token
    return total


def add_generation_graphs(
    ctx: Context, subject: ExportedModel, batch: Batch, source: Path, finish: Callable[[], None] | None = None
) -> None:
    """Write the generation graphs; all graphs then share their weights. Compare them in float32.

    A shortlist in the folder `source` is included.

    Args:
        ctx: of the stage.
        subject: the graphs of a step.
        batch: the texts that they are compared on.
        source: the model's folder.
        finish: converts the graphs of a step to the deployed precision, if that rounds; called after the
            float32 graphs were compared.
    """
    names = [graph.name for graph in subject.graphs]
    folders = [ctx.out]
    with ExitStack() as stack:
        if subject.tolerance != "fp32" or finish is not None:
            folders.insert(0, stack.enter_context(make_dequantized_copy(ctx.out, names, widen=False)))
        for folder in folders:
            if finish is not None and folder is ctx.out:
                finish()
            if (source / SHORTLIST).is_file():
                shutil.copyfile(source / SHORTLIST, folder / SHORTLIST)
            write_generation_graphs(folder, names)
            with open_folder(folder, "onnx", subject.target, ctx.threads) as runner:
                ask = verify_generation_graphs if folder is folders[0] else run_generation_graphs
                ask(runner, batch)
