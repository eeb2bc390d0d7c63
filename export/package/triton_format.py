"""The format `triton`: a graph for Triton's onnxruntime or tensorrt backend, and a Python model.

config.pbtxt is written in protobuf's text format. Source: triton-inference-server/common,
protobuf/model_config.proto (message ModelConfig).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.data.tasks import task_traits
from smelt.export.package.package_format import (
    TEXT_GRAPHS,
    PackageOrigin,
    SupportedArtifacts,
    UsageNotes,
)

if TYPE_CHECKING:
    from smelt.generation.config import GenerationConfig


@dataclass(frozen=True)
class EnumValue:
    """An enum value, which the text format writes without quotation marks."""

    name: str


@dataclass(frozen=True)
class TritonTensor:
    """An input or output: name, DataType (TYPE_INT64), dimensions without the batch (-1: any)."""

    name: str
    kind: str
    dims: tuple[int, ...]


def model_config(
    name: str,
    backend: str,
    inputs: Sequence[TritonTensor],
    outputs: Sequence[TritonTensor],
    max_batch_size: int,
    delay_us: int,
    parameters: Mapping[str, str] | None = None,
    device: str = "KIND_CPU",
    profile: int | None = None,
) -> str:
    """Return config.pbtxt of a model with dynamic batching.

    Args:
        name: of the model and of its folder.
        backend: onnxruntime, tensorrt or python.
        inputs: of a request.
        outputs: of a request.
        max_batch_size: samples per call.
        delay_us: microseconds that a request waits for others.
        parameters: for the backend, or for the Python model.
        device: KIND_CPU or KIND_GPU.
        profile: number of the engine's optimization profile; None: the only one.
    """
    group = {"count": 1, "kind": EnumValue(device)}
    fields: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "max_batch_size": max_batch_size,
        "input": [_tensor_message(tensor) for tensor in inputs],
        "output": [_tensor_message(tensor) for tensor in outputs],
        "dynamic_batching": {"max_queue_delay_microseconds": delay_us},
        "instance_group": [group if profile is None else {**group, "profile": [str(profile)]}],
        "parameters": [
            {"key": key, "value": {"string_value": value}} for key, value in (parameters or {}).items()
        ],
    }
    return "".join(_lines(fields, 0))


def _tensor_message(tensor: TritonTensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": EnumValue(tensor.kind), "dims": list(tensor.dims)}


def _lines(message: Mapping[str, Any], deep: int) -> list[str]:
    """Return the fields of a message; a list is a repeated field, a mapping a nested message."""
    lines = []
    for field, value in message.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                lines += [f"{'  ' * deep}{field} {{\n", *_lines(item, deep + 1), f"{'  ' * deep}}}\n"]
            else:
                value_text = (
                    item.name if isinstance(item, EnumValue) else json.dumps(item, ensure_ascii=False)
                )
                lines.append(f"{'  ' * deep}{field}: {value_text}\n")
    return lines


REPOSITORY_FOLDER, GRAPH_MODEL, TEXT_MODEL = "model_repository", "graph", "text"
_RENDERING_FILE = "prompt_rendering.py"  # for chat templates
_LARGEST_BATCH = 32  # for a graph whose batch is not limited
_DELAY_US = 2000
_TOKENIZER_FILES = ("tokenizer.json", "source.spm", "vocab.json")

_CLIENT = """\
import argparse

import numpy as np
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

parser = argparse.ArgumentParser(description="Send texts to a running server.")
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


class TritonFormat:
    """A model repository of two models: `graph`, and `text`, which takes strings and calls `graph`."""

    name: ClassVar[str] = "triton"
    summary: ClassVar[str] = "a model repository for Triton: graph and Python tokenizer"
    supported: ClassVar[SupportedArtifacts] = SupportedArtifacts(
        formats=frozenset({"onnx", "tensorrt"}),
        targets=frozenset({"ort-cpu", "tensorrt"}),
        tasks=TEXT_GRAPHS.tasks,
        hint="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
    )
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require one graph or engine for the whole task, and a tokenizer that works without transformers.

        Raises:
            InputError: there is none.
        """
        from smelt.export.package.one_file_format import generation_config_of, select_graph
        from smelt.models.tokenizer import read_tokenizer_info
        from smelt.runtimes.tensorrt_engine import read_sidecar

        details = read_tokenizer_info(artifact.path)
        if details.reader == "transformers":
            raise InputError(
                f"its tokenizer needs transformers ({details.reason}).", code="unsupported-tokenizer"
            )
        if artifact.format == "onnx" and artifact.manifest.details.get("target") == "tensorrt":
            raise InputError(
                "it is the ONNX model of a TensorRT engine; package the engine.", code="unsupported-target"
            )
        if artifact.format == "onnx":
            decoding = (
                generation_config_of(artifact.path, {})
                if task_traits(artifact.manifest.task).generates
                else None
            )
            select_graph(artifact.path, decoding)
        elif task_traits(artifact.manifest.task).generates:
            raise InputError(
                "an engine computes one generation step, and this format has no generation loop for engines.",
                code="unsupported-task",
            )
        else:
            sidecar = read_sidecar(artifact.path / "model.plan")
            if sidecar is not None and sidecar.weights == "stripped":
                raise InputError(
                    "its engine has no weights (weights: stripped), and Triton cannot add them. Build it with"
                    " weights: embedded.",
                    code="stripped-engine",
                )

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write both models, a client, and the start command of the server.

        Raises:
            InputError: a graph does not support the run's generation settings.
        """
        from smelt.export.package.one_file_format import generation_config_of

        generates = task_traits(artifact.manifest.task).generates
        decoding = generation_config_of(artifact.path, origin.generation) if generates else None
        inputs, output, max_batch_size = _write_graph(
            artifact, decoding, folder / REPOSITORY_FOLDER / GRAPH_MODEL
        )
        _write_text(
            artifact, decoding, inputs, output, max_batch_size, folder / REPOSITORY_FOLDER / TEXT_MODEL
        )
        (folder / "client.py").write_text(_CLIENT, encoding="utf-8")
        run = 'tritonserver --model-repository "$PWD/model_repository"'
        reader = "tokenizers" if list(folder.rglob("tokenizer.json")) else "sentencepiece"
        reader += " jinja2" if list(folder.rglob(_RENDERING_FILE)) else ""
        ask = "pip install numpy 'tritonclient[http]'\npython client.py \"TEXT\""
        notes = (
            "The server has not been tested: config.pbtxt was checked against the published schema, and"
            " `execute` of the Python model was run with a stand-in for Triton's module.",
            "The installed packages are for the model `text`, in the Python of the server: numpy and"
            f" {reader.replace(' ', ', ')}. Triton needs the backends that config.pbtxt names.",
            "`client.py` sends texts to the running server; set its address with `--server`.",
        )
        return UsageNotes(
            f"pip install numpy {reader}", run, (("bash", ask), ("python", f"# client.py\n{_CLIENT}")), notes
        )


def _write_graph(
    artifact: Artifact, decoding: GenerationConfig | None, folder: Path
) -> tuple[list[str], TritonTensor, int]:
    """Write the graph model; return the names of its inputs, its output, and its largest batch."""
    import onnx

    from smelt.export.package.one_file_format import select_graph, self_contained_graph
    from smelt.models.tokenizer import uses_token_types

    config = read_json_object(artifact.path / "config.json")
    (folder / "1").mkdir(parents=True)
    profile = None
    if artifact.format == "tensorrt":
        shutil.copyfile(artifact.path / "model.plan", folder / "1" / "model.plan")
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if uses_token_types(config) else [])]
        backend, device = "tensorrt", "KIND_GPU"
        largest, profiles = artifact.manifest.details["profile"], artifact.manifest.details.get("profiles")
        max_batch_size, profile = int(largest["batch"][2]), profiles.index(largest) if profiles else None
    else:
        vocabulary = int(config.get("decoder_vocab_size") or config["vocab_size"])
        model = self_contained_graph(select_graph(artifact.path, decoding), decoding, vocabulary)
        onnx.save(model, folder / "1" / "model.onnx")
        defaults = {tensor.name for tensor in model.graph.initializer}
        names = [value.name for value in model.graph.input if value.name not in defaults]
        backend, device, max_batch_size = "onnxruntime", "KIND_CPU", _LARGEST_BATCH
    output = _output_tensor(artifact, config)
    inputs = [TritonTensor(name, "TYPE_INT64", (-1,)) for name in names]
    content = model_config(
        GRAPH_MODEL, backend, inputs, [output], max_batch_size, _DELAY_US, device=device, profile=profile
    )
    (folder / "config.pbtxt").write_text(content, encoding="utf-8")
    return names, output, max_batch_size


def _output_tensor(artifact: Artifact, config: dict[str, Any]) -> TritonTensor:
    from smelt.models.families.registry import find_family

    task = artifact.manifest.task
    if task_traits(task).generates:
        return TritonTensor("sequences", "TYPE_INT64", (-1,))
    family = find_family(config)
    if task_traits(task).output == "embedding" and family is not None:
        return TritonTensor("sentence_embedding", "TYPE_FP32", (int(family.hidden_size(config) or -1),))
    return TritonTensor("logits", "TYPE_FP32", (len(config.get("id2label") or (0, 1)),))


def _write_text(
    artifact: Artifact,
    decoding: GenerationConfig | None,
    inputs: list[str],
    output: TritonTensor,
    most: int,
    folder: Path,
) -> None:
    """Write the Python model, its settings and the tokenizer's files."""
    (folder / "1").mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (artifact.path / name).is_file():
            shutil.copyfile(artifact.path / name, folder / "1" / name)
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), folder / "1" / "model.py")
    settings = text_model_settings(artifact.path, decoding, inputs, output.name)
    write_json(folder / "1" / "settings.json", settings)
    if (settings["prompt_template"] or {}).get("chat_template"):
        part = Path(__file__).with_name("standalone") / _RENDERING_FILE
        shutil.copyfile(part, folder / "1" / _RENDERING_FILE)
    texts = output.name == "sequences"
    answer = TritonTensor("ANSWER", "TYPE_STRING" if texts else output.kind, (1,) if texts else output.dims)
    content = model_config(
        TEXT_MODEL, "python", [TritonTensor("TEXT", "TYPE_STRING", (1,))], [answer], most, _DELAY_US
    )
    (folder / "config.pbtxt").write_text(content, encoding="utf-8")


def text_model_settings(
    source: Path, decoding: GenerationConfig | None, inputs: list[str], output: str
) -> dict[str, Any]:
    """Return settings.json of the Python model: tokenization, and inputs and outputs of the graph."""
    from smelt.export.package.text_nodes import special_tokens_around
    from smelt.generation.config import MAX_NEW_TOKENS
    from smelt.generation.generating_runners import is_causal
    from smelt.generation.prompt_batches import padding_token
    from smelt.models.text_rules import max_input_length
    from smelt.models.tokenizer import open_tokenizer, read_tokenizer_info

    config, details = read_json_object(source / "config.json"), read_tokenizer_info(source)
    tokenizer = open_tokenizer(source)
    prefix_tokens, suffix_tokens = special_tokens_around(tokenizer)
    limit, causal = max_input_length(tokenizer, config), is_causal(config)
    if causal and decoding is not None:
        limit = max(1, limit // 2, limit + 1 - (decoding.max_new_tokens or MAX_NEW_TOKENS))
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return {
        "graph": GRAPH_MODEL,
        "inputs": inputs,
        "output": output,
        "causal": causal,
        "prefix": tokenizer.prefix,
        "lower": tokenizer.lower,
        "before": list(prefix_tokens),
        "after": list(suffix_tokens),
        "room": limit - len(prefix_tokens) - len(suffix_tokens),
        "keeps_end": causal or details.truncation_side == "left",
        "pad": padding_token(tokenizer) if causal else tokenizer.pad_token_id or 0,
        "empty": first,
        "bos": tokenizer.bos_token_id,
        "prompt_template": None if tokenizer.prompts is None else asdict(tokenizer.prompts),
        "eos": [] if decoding is None else decoding.eos,
        "special": details.special,
        "unknown": details.unknown,
    }
