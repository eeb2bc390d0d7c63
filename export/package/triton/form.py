"""The form `triton`: a graph for Triton's onnxruntime or tensorrt backend, and Python before it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.data import SIMILARITY, TEXT_TASKS
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.export.package.form import HowTo, Origin, Takes
from smelt.export.package.triton.config import Tensor, model_config

if TYPE_CHECKING:
    from smelt.runtime.generate.decoding import Decoding

REPOSITORY, GRAPH, TEXT = "model_repository", "graph", "text"
_GENERATES = ("translation", "summarization", "language-modeling")
_LARGEST_BATCH = 32  # of a graph whose batch has no bound of its own
_DELAY_US = 2000
_WORDS = ("tokenizer.json", "source.spm", "vocab.json")

_CLIENT = """\
import argparse

import numpy as np
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

parser = argparse.ArgumentParser(description="Asks the server, which has to run.")
parser.add_argument("text", nargs="+", type=str.encode, help="a text, in UTF-8")
parser.add_argument("--server", default="localhost:8000", help="default: localhost:8000")
asked = parser.parse_args()
client = http.InferenceServerClient(asked.server)
texts = np.array([[text] for text in asked.text], dtype=object)
given = http.InferInput("TEXT", list(texts.shape), "BYTES")
given.set_data_from_numpy(texts)
try:
    answers = client.infer("text", [given]).as_numpy("ANSWER")
except (OSError, InferenceServerException) as error:
    parser.exit(1, f"client.py: {asked.server}: {error}\\n")
for answer in answers:
    print(answer[0].decode() if answer.dtype == object else answer.tolist())
"""


class Triton:
    """A model repository of two models: `graph`, and `text`, which takes strings and asks `graph`."""

    name: ClassVar[str] = "triton"
    summary: ClassVar[str] = "a model repository for Triton: graph, and Python before it"
    takes: ClassVar[Takes] = Takes(
        formats=frozenset({"onnx", "tensorrt"}),
        targets=frozenset({"ort-cpu", "tensorrt"}),
        tasks=frozenset(TEXT_TASKS),
        mend="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
    )
    keeps: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require one graph for the whole task, and a tokenizer without transformers.

        Raises:
            InputError: there is none.
        """
        from smelt.export.package.one_file.whole_graph import decoding_of, graph_for
        from smelt.runtime.text.tokenizing_file import read_tokenizing

        details = read_tokenizing(artifact.path)
        if details.reader == "transformers":
            raise InputError(
                f"its texts are read by transformers ({details.reason}).", code="unsupported-tokenizer"
            )
        if artifact.format == "onnx" and artifact.manifest.details.get("target") == "tensorrt":
            raise InputError(
                "it is the ONNX that an engine is built of; package the engine.", code="unsupported-target"
            )
        if artifact.format == "onnx":
            decoding = decoding_of(artifact.path, {}) if artifact.manifest.task in _GENERATES else None
            graph_for(artifact.path, decoding)
        elif artifact.manifest.task in _GENERATES:
            raise InputError(
                "an engine makes one step of a text, and this form has no loop for engines.",
                code="unsupported-task",
            )

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Write both models, a client, and how the server is started.

        Raises:
            InputError: the run's settings of generation are none for a graph.
        """
        from smelt.export.package.one_file.whole_graph import decoding_of

        generates = artifact.manifest.task in _GENERATES
        decoding = decoding_of(artifact.path, origin.generation) if generates else None
        inputs, output, most = _write_graph(artifact, decoding, folder / REPOSITORY / GRAPH)
        _write_text(artifact, decoding, inputs, output, most, folder / REPOSITORY / TEXT)
        (folder / "client.py").write_text(_CLIENT, encoding="utf-8")
        run = 'tritonserver --model-repository "$PWD/model_repository"'
        reader = "tokenizers" if list(folder.rglob("tokenizer.json")) else "sentencepiece"
        ask = "pip install numpy 'tritonclient[http]'\npython client.py \"TEXT\""
        notes = (
            "The server was not run where this was written: config.pbtxt was checked against the published"
            " schema, and `execute` of the model in Python was run on a stand-in for Triton's module.",
            f"What is installed first is for `text`, in the Python of the server: numpy and {reader}. Triton"
            " has to have the backends that config.pbtxt names.",
            "`client.py` asks the server once it runs; `--server` says where that is.",
        )
        return HowTo(
            f"pip install numpy {reader}", run, (("bash", ask), ("python", f"# client.py\n{_CLIENT}")), notes
        )


def _write_graph(
    artifact: Artifact, decoding: Decoding | None, folder: Path
) -> tuple[list[str], Tensor, int]:
    """Write the model that computes; return the names of its inputs, its output, and its largest batch."""
    import onnx

    from smelt.export.package.one_file.whole_graph import graph_for, whole_graph
    from smelt.runtime.predict import takes_types

    config = read_json(artifact.path / "config.json")
    (folder / "1").mkdir(parents=True)
    if artifact.format == "tensorrt":
        shutil.copyfile(artifact.path / "model.plan", folder / "1" / "model.plan")
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if takes_types(config) else [])]
        backend, device, most = "tensorrt", "KIND_GPU", int(artifact.manifest.details["profile"]["batch"][2])
    else:
        vocabulary = int(config.get("decoder_vocab_size") or config["vocab_size"])
        model = whole_graph(graph_for(artifact.path, decoding), decoding, vocabulary)
        onnx.save(model, folder / "1" / "model.onnx")
        defaults = {tensor.name for tensor in model.graph.initializer}
        names = [one.name for one in model.graph.input if one.name not in defaults]
        backend, device, most = "onnxruntime", "KIND_CPU", _LARGEST_BATCH
    output = _output(artifact, config)
    inputs = [Tensor(name, "TYPE_INT64", (-1,)) for name in names]
    said = model_config(GRAPH, backend, inputs, [output], most, _DELAY_US, device=device)
    (folder / "config.pbtxt").write_text(said, encoding="utf-8")
    return names, output, most


def _output(artifact: Artifact, config: dict[str, Any]) -> Tensor:
    from smelt.families.registry import find_family

    task = artifact.manifest.task
    if task in _GENERATES:
        return Tensor("sequences", "TYPE_INT64", (-1,))
    family = find_family(config)
    if task == SIMILARITY and family is not None:
        return Tensor("sentence_embedding", "TYPE_FP32", (int(config[family.width]),))
    return Tensor("logits", "TYPE_FP32", (len(config.get("id2label") or (0, 1)),))


def _write_text(
    artifact: Artifact, decoding: Decoding | None, inputs: list[str], output: Tensor, most: int, folder: Path
) -> None:
    """Write the model in Python, its settings and the tokenizer's files."""
    (folder / "1").mkdir(parents=True)
    for name in _WORDS:
        if (artifact.path / name).is_file():
            shutil.copyfile(artifact.path / name, folder / "1" / name)
    shutil.copyfile(Path(__file__).with_name("model.py"), folder / "1" / "model.py")
    write_json(folder / "1" / "settings.json", settings_of(artifact.path, decoding, inputs, output.name))
    texts = output.name == "sequences"
    answer = Tensor("ANSWER", "TYPE_STRING" if texts else output.kind, (1,) if texts else output.dims)
    said = model_config(TEXT, "python", [Tensor("TEXT", "TYPE_STRING", (1,))], [answer], most, _DELAY_US)
    (folder / "config.pbtxt").write_text(said, encoding="utf-8")


def settings_of(source: Path, decoding: Decoding | None, inputs: list[str], output: str) -> dict[str, Any]:
    """Return settings.json of the model in Python: how texts become rows, and what is asked of the graph."""
    from smelt.export.package.one_file.read_texts import specials_of
    from smelt.runtime.causal import is_causal
    from smelt.runtime.generate.decoding import MAX_NEW_TOKENS
    from smelt.runtime.generate.prompts import pad_of
    from smelt.runtime.text.limits import length_limit
    from smelt.runtime.text.open_tokenizer import open_tokenizer
    from smelt.runtime.text.tokenizing_file import read_tokenizing

    config, details = read_json(source / "config.json"), read_tokenizing(source)
    tokenizer = open_tokenizer(source)
    before, after = specials_of(tokenizer)
    limit, causal = length_limit(tokenizer, config), is_causal(config)
    if causal and decoding is not None:
        limit = max(1, limit // 2, limit + 1 - (decoding.max_new_tokens or MAX_NEW_TOKENS))
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return {
        "graph": GRAPH,
        "inputs": inputs,
        "output": output,
        "causal": causal,
        "prefix": tokenizer.prefix,
        "lower": tokenizer.lower,
        "before": list(before),
        "after": list(after),
        "room": limit - len(before) - len(after),
        "keeps_end": causal or details.truncation_side == "left",
        "pad": pad_of(tokenizer) if causal else tokenizer.pad_token_id or 0,
        "empty": first,
        "eos": [] if decoding is None else decoding.eos,
        "special": details.special,
        "unknown": details.unknown,
    }
