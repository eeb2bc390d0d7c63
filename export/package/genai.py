"""The format `genai`: a language model with the config of onnxruntime-genai, which runs the generation loop.

Source: onnxruntime-genai 0.18, src/config.cpp and models/builders/base.py (`make_genai_config`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.data.tasks import tasks_with
from smelt.export.package.package_format import PackageOrigin, SupportedArtifacts, UsageNotes

if TYPE_CHECKING:
    from smelt.generation.config import GenerationConfig
    from smelt.models.prompt_template import PromptTemplate

GENAI_CONFIG_FILE, _GRAPH = "genai_config.json", "model.onnx"
# any decoder-only model whose inputs and outputs are named in the config
_MODEL_TYPE = "decoder"
# transformers' class of a tokenizer that is only a tokenizer.json; onnxruntime-genai requires a known class
_NAMELESS = ("TokenizersBackend", "PreTrainedTokenizerFast", None)
_GENERATION_GRAPHS = ("generate.onnx", "generate_beams.onnx")

_PROGRAM = """\
import argparse
{imports}
import onnxruntime_genai as og
{rendering}
parser = argparse.ArgumentParser(description="{what} with the model.")
parser.add_argument("text", nargs="+", type=lambda text: text.encode().decode(), help="a text, in UTF-8")
texts = parser.parse_args().text
BEFORE = {before}  # tokens at the start of each text
model = og.Model(str(Path(__file__).parent))
tokenizer = og.Tokenizer(model)
for text in texts:
    ids = [int(token) for token in tokenizer.encode({text})]
    ids = ids if ids[: len(BEFORE)] == BEFORE else BEFORE + ids
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=min({longest}, len(ids) + {new}))
    generator = og.Generator(model, settings)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    new = [int(token) for token in generator.get_sequence(0)][len(ids) :]
    print({output})
"""
_TEXT_RENDERING = """
TEMPLATE = {template!r}


def render(prompt):
    return TEMPLATE.replace("{{prompt}}", prompt)

"""
# A prompt may also be a conversation, a JSON list of messages.
_CHAT_RENDERING = """from prompt_rendering import compile_template, render_chat

PROMPTS = json.loads((Path(__file__).parent / "{file}").read_text(encoding="utf-8"))
CHAT = compile_template(PROMPTS["chat_template"])


def render(prompt):
    return render_chat(CHAT, prompt, PROMPTS["special_tokens"])

"""
_TEMPLATE_FILE, _RENDERING_FILE = "prompt_template.json", "prompt_rendering.py"


class GenaiFormat:
    """The graph of a step without changes; `genai_config.json` names its inputs and outputs."""

    name: ClassVar[str] = "genai"
    summary: ClassVar[str] = "a language model for onnxruntime-genai (genai_config.json)"
    supported: ClassVar[SupportedArtifacts] = SupportedArtifacts(
        formats=frozenset({"onnx"}),
        targets=frozenset({"ort-cpu"}),
        tasks=frozenset(tasks_with(architecture="decoder")),
        hint="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
    )
    is_artifact: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require a model that the config can describe.

        Raises:
            InputError: layers of different shapes, a tokenizer without tokenizer.json, or no end token.
        """
        from smelt.export.package.hub_files import require_float_caches

        require_float_caches(artifact.path, _GRAPH.removesuffix(".onnx"), "onnxruntime-genai")
        _cache_shapes(artifact.path)
        if not (artifact.path / "tokenizer.json").is_file():
            raise InputError(
                "it has no tokenizer.json, which onnxruntime-genai requires.", code="unsupported-tokenizer"
            )
        if not _generation_config(artifact.path, {}).eos:
            raise InputError(
                "its generation config has no end token (eos_token_id).",
                code="missing-eos-token",
            )

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Copy graph and tokenizer; write the config and a program.

        Raises:
            InputError: this runtime does not support the run's generation settings.
        """
        from smelt.export.package.hub_files import preprocessing_notes
        from smelt.export.package.text_nodes import special_tokens_around
        from smelt.models.text_rules import read_prompt_template
        from smelt.models.tokenizer import open_tokenizer

        config = read_json_object(artifact.path / "config.json")
        decoding = _generation_config(artifact.path, origin.generation)
        before, after = special_tokens_around(open_tokenizer(artifact.path))
        if after:
            raise InputError(
                "its tokenizer adds a token after each text; onnxruntime-genai's does not.",
                code="unsupported-tokenizer",
            )
        for name in artifact.manifest.files:
            if name not in _GENERATION_GRAPHS:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.path / name, folder / name)
        settings = genai_config(artifact.path, config, decoding)
        write_json(folder / GENAI_CONFIG_FILE, settings)
        tokenizer = read_json_object(folder / "tokenizer_config.json")
        write_json(
            folder / "tokenizer_config.json",
            tokenizer | {"tokenizer_class": _tokenizer_class(folder)},
        )
        longest = settings["model"]["context_length"]
        template = read_prompt_template(artifact.path)
        numbers = {"longest": longest, "new": decoding.requested_new_tokens(1)}
        program = _program(template, list(before), numbers)
        (folder / "answer.py").write_text(program, encoding="utf-8")
        is_chat = template is not None and template.is_chat
        if template is not None and is_chat:
            write_json(folder / _TEMPLATE_FILE, asdict(template))
            part = Path(__file__).with_name("standalone") / _RENDERING_FILE
            shutil.copyfile(part, folder / _RENDERING_FILE)
        notes = (
            *preprocessing_notes(artifact.path),
            *(["`answer.py` applies the prompt template."] if template is not None else ()),
            f"`{GENAI_CONFIG_FILE}` sets greedy search; change it with `set_search_options` (`num_beams`,"
            f" `do_sample`).",
            "Texts are tokenized by onnxruntime-genai's own reader of tokenizer.json, which was not compared"
            " with the model's tokenizer.",
        )
        install = f"pip install 'onnxruntime-genai>=0.18'{' jinja2' * is_chat}"
        return UsageNotes(install, 'python answer.py "TEXT"', (("python", f"# answer.py\n{program}"),), notes)


def _program(template: PromptTemplate | None, before: list[int], numbers: Mapping[str, int]) -> str:
    """Return answer.py: it continues texts, or with a prompt template answers prompts.

    Args:
        template: of the model's prompts, if it has one.
        before: tokens at the start of each text; a rendered chat has them.
        numbers: `longest` and `new`, numbers of tokens.
    """
    if template is None:
        fields = {"what": "Continue texts", "text": "text", "output": "text + tokenizer.decode(new)"}
        return _PROGRAM.format(
            imports="from pathlib import Path\n", rendering="", before=before, **fields, **numbers
        )
    if template.is_chat:
        imports = "import json\nfrom pathlib import Path\n"
        rendering, before = _CHAT_RENDERING.format(file=_TEMPLATE_FILE), []
    else:
        imports = "from pathlib import Path\n"
        rendering = _TEXT_RENDERING.format(template=template.template)
    fields = {"what": "Answer prompts", "text": "render(text)", "output": "tokenizer.decode(new)"}
    return _PROGRAM.format(imports=imports, rendering=rendering, before=before, **fields, **numbers)


def genai_config(source: Path, config: dict[str, Any], decoding: GenerationConfig) -> dict[str, Any]:
    """Return genai_config.json of the model in `source`.

    Args:
        source: an artifact's folder with model.onnx.
        config: the model's Hugging Face config.
        decoding: the generation settings.
    """
    from smelt.models.text_rules import NO_LIMIT, position_limit

    layers, heads, width = _cache_shapes(source)
    queries = int(config.get("num_attention_heads") or config["n_head"])
    longest = min(position_limit(config) or NO_LIMIT, int(config.get("max_position_embeddings") or NO_LIMIT))
    return {
        "model": {
            "type": _MODEL_TYPE,
            "bos_token_id": int(config.get("bos_token_id") or decoding.eos[0]),
            "eos_token_id": decoding.eos if len(decoding.eos) > 1 else decoding.eos[0],
            "pad_token_id": decoding.pad,
            "vocab_size": int(config["vocab_size"]),
            "context_length": longest,
            "decoder": {
                "filename": _GRAPH,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "head_size": width,
                "hidden_size": int(config.get("hidden_size") or config["n_embd"]),
                "num_attention_heads": queries,
                "num_hidden_layers": layers,
                "num_key_value_heads": heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": longest,
            "min_length": 0,
            "num_beams": 1,
            "past_present_share_buffer": False,  # the graph returns new caches of the current length
            "repetition_penalty": decoding.repetition_penalty,
        },
    }


def _generation_config(source: Path, generation: Any) -> GenerationConfig:
    """Return the model's generation settings.

    Raises:
        InputError: the config cannot express a rule.
    """
    from smelt.generation.config import GenerationSettings, resolve_generation
    from smelt.generation.runner import read_model_files

    model: Any = read_model_files(source)
    found = resolve_generation(GenerationSettings(**generation), model)
    if found.bad_words_ids or found.no_repeat_ngram_size:
        raise InputError(
            "its generation settings contain bad_words_ids or no_repeat_ngram_size, which this format does"
            " not support.",
            code="unsupported-generation-setting",
        )
    return found


def _cache_shapes(source: Path) -> tuple[int, int, int]:
    """Return the number of layers of model.onnx in `source`, and heads and width of each layer's keys.

    Raises:
        InputError: layers differ, as after pruning heads.
    """
    from smelt.export.graph_files import read_graph

    graph = read_graph(source / _GRAPH, values=False).graph
    shapes = [
        tuple(int(value.type.tensor_type.shape.dim[axis].dim_value) for axis in (1, 3))
        for value in graph.input
        if value.name.startswith("past_key_values.") and value.name.endswith(".key")
    ]
    if len(set(shapes)) != 1:
        raise InputError(
            "its layers have different numbers of heads; genai_config.json supports only one number for all.",
            code="unsupported-structure",
        )
    heads, width = shapes[0]
    return len(shapes), heads, width


def _tokenizer_class(folder: Path) -> str:
    """Return the tokenizer class of `folder`; without one, the class that matches its tokenizer.json."""
    name = read_json_object(folder / "tokenizer_config.json").get("tokenizer_class")
    if name not in _NAMELESS:
        return str(name)
    decoder = read_json_object(folder / "tokenizer.json").get("decoder") or {}
    return "GPT2Tokenizer" if decoder.get("type") == "ByteLevel" else "LlamaTokenizer"
