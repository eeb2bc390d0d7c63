"""The format `one-file`: one ONNX file that answers in one call, in any language with ONNX Runtime.

The graph contains everything: weights, the generation loop, and the generation settings. The package also has
two example programs, and usage notes in its README.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.data.labels import SINGLE_LABEL, class_names, problem_type
from smelt.data.tasks import task_traits
from smelt.export.graph_files import read_graph
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.export.package.text_graph import (
    TextPlan,
    open_extensions_session,
    require_equal_tokens,
    text_graph,
)
from smelt.generation.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH
from smelt.generation.config import MAX_NEW_TOKENS, GenerationConfig, GenerationSettings, resolve_generation
from smelt.generation.generating_runners import is_causal
from smelt.generation.runner import read_model_files
from smelt.generation.search import generation_feeds, graph_supports
from smelt.models.text_rules import max_input_length
from smelt.runtimes.graph_walk import iter_initializers

if TYPE_CHECKING:
    from smelt.export.package.text_graph import TextPlan


NUMBERS_FILE, STRINGS_FILE = "model.onnx", "model_text.onnx"
_PYTHON_FILE, _NODE_FILE = "answer.py", "answer.mjs"
# its install scripts would download GPU libraries
_INSTALL_IN_NODE = "npm install --ignore-scripts onnxruntime-node"
_MAX_SHOWN = 24  # characters of an edge-case text

_FROM_STRINGS = """\
import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_extensions

parser = argparse.ArgumentParser(description="Run the model on texts.")
parser.add_argument("text", nargs="+", type=lambda text: text.encode().decode(), help="a text, in UTF-8")
texts = np.array(parser.parse_args().text, dtype=object)
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # otherwise it warns about each input with a default
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
session = onnxruntime.InferenceSession(Path(__file__).with_name("{file}"), options)
for answer in session.run(["{answer}"], {{"texts": texts}})[0]:
    print(answer)
"""

_FROM_NUMBERS = """\
import argparse
from pathlib import Path

import numpy as np
import onnxruntime

parser = argparse.ArgumentParser(description="Run the model on the tokens of a text.")
parser.add_argument("token", nargs="+", type=int, help="id of a token in the vocabulary")
ids = np.array([parser.parse_args().token])  # one text; for several, the mask marks padding
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # otherwise it warns about each input with a default
session = onnxruntime.InferenceSession(Path(__file__).with_name("{file}"), options)
feeds = {{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}}
taken = {{one.name: feeds[one.name] for one in session.get_inputs()}}
print(*session.run(["{answer}"], taken)[0][0].tolist())
"""

_IN_NODE = """\
import {{ fileURLToPath }} from "node:url";
import * as ort from "onnxruntime-node";

const given = process.argv.slice(2);  // one text
if (!given.length || !given.every((word) => /^\\d+$/.test(word))) {{
  console.error("usage: node answer.mjs TOKEN..., ids of tokens in the vocabulary");
  process.exit(2);
}}
const words = given.map(BigInt);
const file = fileURLToPath(new URL("{file}", import.meta.url));
const session = await ort.InferenceSession.create(file, {{ logSeverityLevel: 3 }});
const tensor = (values) => new ort.Tensor("int64", BigInt64Array.from(values), [1, words.length]);
const all = {{
  input_ids: tensor(words),
  attention_mask: tensor(words.map(() => 1n)),
  token_type_ids: tensor(words.map(() => 0n)),
}};
const feeds = Object.fromEntries(session.inputNames.filter((n) => n in all).map((n) => [n, all[n]]));
console.log([...(await session.run(feeds, ["{answer}"])).{answer}.data].join(" "));
"""


def answer_outputs(task: str, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the output that answers a user, of the graph with string inputs and of the other one."""
    if task_traits(task).generates:
        return "generated", "sequences"
    if task_traits(task).output == "embedding":
        return "sentence_embedding", "sentence_embedding"
    return ("labels" if problem_type(config) == SINGLE_LABEL else "logits"), "logits"


def write_usage_examples(
    folder: Path, answers: tuple[str, str], why: str | None, edge_cases: Sequence[str]
) -> UsageNotes:
    """Write the programs into `folder`; return the usage notes.

    Args:
        folder: with the graphs.
        answers: as `answer_outputs` returns them.
        why: the reason why there is no graph with string inputs; None if there is one.
        edge_cases: texts that it tokenizes differently from the model's tokenizer.
    """
    strings, numeric_output = answers
    node = _IN_NODE.format(file=NUMBERS_FILE, answer=numeric_output)
    (folder / _NODE_FILE).write_text(node, encoding="utf-8")
    numeric_note = (
        f"`{NUMBERS_FILE}` takes `input_ids` and returns `{numeric_output}`. It needs only ONNX Runtime."
    )
    program = _FROM_NUMBERS if why is not None else _FROM_STRINGS
    file, answer = (NUMBERS_FILE, numeric_output) if why is not None else (STRINGS_FILE, strings)
    python = program.format(file=file, answer=answer)
    (folder / _PYTHON_FILE).write_text(python, encoding="utf-8")
    in_node = f"{_INSTALL_IN_NODE}\nnode {_NODE_FILE} 5 6 7"
    load = (
        ("bash", in_node),
        ("python", f"# {_PYTHON_FILE}\n{python}"),
        ("javascript", f"// {_NODE_FILE}\n{node}"),
    )
    if why is not None:
        note = (numeric_note, f"There is no file with string inputs: {why}.")
        return UsageNotes("pip install onnxruntime numpy", f"python {_PYTHON_FILE} 5 6 7", load, note)
    notes = [
        f"`{STRINGS_FILE}` takes `texts` and returns `{strings}`: `python {_PYTHON_FILE} TEXT...`. Its"
        " tokenizer consists of operators of onnxruntime-extensions. Python and C# can load them"
        " (`RegisterOrtExtensions()` in C#, not tested here); onnxruntime-node and onnxruntime-web cannot.",
        f"{numeric_note} `{_NODE_FILE}` runs it in Node. Each file is complete: copy the one you need.",
        "Its tokenizer gives the same tokens as the model's own on 10,000 texts generated from its"
        " vocabulary.",
    ]
    if edge_cases:
        example_texts = ", ".join(json.dumps(text[:_MAX_SHOWN], ensure_ascii=True) for text in edge_cases)
        notes.append(f"Edge-case texts that are tokenized differently, or not at all: {example_texts}.")
    needs = "pip install onnxruntime 'onnxruntime-extensions>=0.15' numpy"
    return UsageNotes(needs, f'python {_PYTHON_FILE} "TEXT"', load, tuple(notes))


_NOT_COPIED = (".onnx", ".onnx_data")


class OneFileFormat:
    """Weights, the generation loop and, where it is exact, the tokenizer are in one graph."""

    name: ClassVar[str] = "one-file"
    summary: ClassVar[str] = "one ONNX file with generation loop, and tokenizer if exact"
    supported: ClassVar[SupportedArtifacts] = TEXT_GRAPHS
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a graph for the whole task, of less than 2 GB.

        Raises:
            InputError: there is none.
        """
        decoding = (
            generation_config_of(artifact.path, {}) if task_traits(artifact.manifest.task).generates else None
        )
        select_graph(artifact.path, decoding)

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write the graph with token inputs, and the graph with string inputs if it is exact.

        Raises:
            InputError: a graph does not support the run's generation settings.
        """
        import onnx

        task, config = artifact.manifest.task, read_json_object(artifact.path / "config.json")
        try:
            decoding = (
                generation_config_of(artifact.path, origin.generation)
                if task_traits(task).generates
                else None
            )
        except InputError as error:
            raise InputError(
                f"This model cannot be packaged as one file: {error}", code=error.code
            ) from error
        path = select_graph(artifact.path, decoding)
        vocabulary = int(config.get("decoder_vocab_size") or config["vocab_size"])
        model = self_contained_graph(path, decoding, vocabulary)
        onnx.save(model, folder / NUMBERS_FILE)
        for name in artifact.manifest.files:
            if not name.endswith(_NOT_COPIED):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.path / name, folder / name)
        awkward: list[str] = []
        unsupported_reason = None
        try:
            awkward = _write_text_graph(artifact.path, model, decoding, vocabulary, folder / STRINGS_FILE)
        except InputError as error:
            unsupported_reason = str(error)
        return write_usage_examples(folder, answer_outputs(task, config), unsupported_reason, awkward)


def _write_text_graph(
    source: Path, model: Any, decoding: GenerationConfig | None, vocabulary: int, path: Path
) -> list[str]:
    """Write the graph from strings to strings; return edge-case texts that it tokenizes differently.

    Raises:
        InputError: the tokenizer cannot be in the graph; the message gives the reason.
    """
    import onnx

    from smelt.models.tokenizer import open_tokenizer

    config, tokenizer = read_json_object(source / "config.json"), open_tokenizer(source)
    causal, limit = is_causal(config), max_input_length(tokenizer, config)
    plan = make_text_plan(source, decoding, vocabulary)
    eos = None if decoding is None else decoding.eos
    awkward = require_equal_tokens(plan, tokenizer, limit, vocabulary, eos, causal)
    graph = text_graph(model, plan, decoding, causal)
    onnx.save(graph, path)
    open_extensions_session(str(path))
    return awkward


def make_text_plan(source: Path, decoding: GenerationConfig | None, vocabulary: int) -> TextPlan:
    """Return the plan of a graph of the artifact in `source` with string inputs and outputs.

    Raises:
        InputError: no operator tokenizes texts as its tokenizer does, or renders its prompt template.
    """
    from smelt.export.package.text_nodes import RowLayout, special_tokens_around, token_texts, tokenizer_nodes
    from smelt.generation.prompt_batches import padding_token
    from smelt.models.tokenizer import open_tokenizer, read_tokenizer_info

    config, details, tokenizer = (
        read_json_object(source / "config.json"),
        read_tokenizer_info(source),
        open_tokenizer(source),
    )
    if tokenizer.prompts is not None and tokenizer.prompts.is_chat:
        raise InputError(
            "operators cannot render a chat template; render the prompt with it, and pass its tokens",
            code="unsupported-prompt-template",
        )
    template = None if tokenizer.prompts is None else tokenizer.prompts.template
    limit, causal = max_input_length(tokenizer, config), is_causal(config)
    cutter, (prefix_tokens, suffix_tokens) = (
        tokenizer_nodes(source, details),
        special_tokens_around(tokenizer),
    )
    empty = None
    if causal and decoding is not None:
        limit = max(1, limit // 2, limit + 1 - (decoding.max_new_tokens or MAX_NEW_TOKENS))
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        empty = None if prefix_tokens or suffix_tokens else begin
    pad = padding_token(tokenizer) if causal else tokenizer.pad_token_id or 0
    ends = causal or details.truncation_side == "left"
    max_text_tokens = limit - len(prefix_tokens) - len(suffix_tokens)
    row_layout = RowLayout(
        prefix_tokens, suffix_tokens, max_text_tokens, pad, pad_left=causal, keep_end=ends, empty_token=empty
    )
    surfaces = None if decoding is None else token_texts(source, details, vocabulary)
    classifies = surfaces is None and problem_type(config) == SINGLE_LABEL and "id2label" in config
    labels = tuple(class_names(config)) if classifies else ()
    return TextPlan(cutter, row_layout, tokenizer.prefix, tokenizer.lower, surfaces, labels, template)


# Protobuf's limit for one message is 2 GiB; the rest is for nodes and tokenizer
MAX_GRAPH_BYTES = 2**31 - 64 * 2**20


def generation_config_of(folder: Path, generation: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation config of the model in `folder` with the settings `generation` of a recipe.

    Raises:
        InputError: a generation graph does not support it.
    """
    model: Any = read_model_files(folder)
    decoding = resolve_generation(GenerationSettings(**generation), model)
    if not graph_supports(decoding):
        raise InputError(
            "its generation settings use sampling or bad_words_ids of several tokens; the generation graph"
            " supports neither.",
            code="unsupported-generation-setting",
        )
    return decoding


def select_graph(folder: Path, decoding: GenerationConfig | None) -> Path:
    """Return the graph in `folder` for the package.

    decoding: of models that generate; None for classifiers and embedders.

    Raises:
        InputError: there is none, or its weights are too large for one file.
    """
    name = "model" if decoding is None else (BEAM_SEARCH_GRAPH if decoding.num_beams > 1 else GREEDY_GRAPH)
    path = folder / f"{name}.onnx"
    if not path.is_file():
        raise InputError(
            f"it has no {path.name}: the graph '{name}' is exported only for target ort-cpu, and not with"
            " `generation_graph: false`. Export it again with `- onnx: {target: ort-cpu}`.",
            code="missing-graph",
            file=path.name,
        )
    if (size := _graph_bytes(path)) > MAX_GRAPH_BYTES:
        raise InputError(
            f"{path.name} has {size:,} bytes of weights, and one ONNX file holds at most 2 GB (protobuf's"
            " limit). Use --format standalone, which stores weights next to the graph.",
            code="graph-too-large",
            file=path.name,
        )
    return path


def self_contained_graph(path: Path, decoding: GenerationConfig | None, vocabulary: int) -> Any:
    """Return the graph `path` as an onnx.ModelProto with all weights inside, which generates as `decoding`.

    Args:
        path: a path that `select_graph` returned.
        decoding: defaults of the generation inputs; None if there are none.
        vocabulary: size of the output layer.
    """
    from onnx import numpy_helper

    model = read_graph(path)
    for tensor in iter_initializers(model.graph):  # the values are inline now
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    if decoding is not None:
        defaults = generation_feeds(decoding, 1, vocabulary)
        for tensor in model.graph.initializer:
            if tensor.name in defaults:
                initializer_values = numpy_helper.to_array(tensor)
                value = defaults[tensor.name].astype(initializer_values.dtype)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def _graph_bytes(path: Path) -> int:
    """Return the bytes of a graph with its weights."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    model = read_graph(path, values=False)
    external_tensors = [tensor for tensor in iter_initializers(model.graph) if uses_external_data(tensor)]
    return path.stat().st_size + sum(ExternalDataInfo(tensor).length or 0 for tensor in external_tensors)
