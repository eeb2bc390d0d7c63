"""The form `genai`: a language model with the config of onnxruntime-genai, which runs the loop itself.

Source: onnxruntime-genai 0.18, src/config.cpp and models/builders/base.py (`make_genai_config`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.export.package.form import HowTo, Origin, Takes

if TYPE_CHECKING:
    from smelt.runtime.generate.decoding import Decoding

CONFIG, _GRAPH = "genai_config.json", "model.onnx"
# any decoder-only model whose inputs and outputs are named in the config
_TYPE = "decoder"
# what transformers calls a tokenizer that is nothing but its tokenizer.json; onnxruntime-genai wants a class
_NAMELESS = ("TokenizersBackend", "PreTrainedTokenizerFast", None)
_LOOPS = ("generate.onnx", "generate_beams.onnx")

_PROGRAM = """\
import argparse
from pathlib import Path

import onnxruntime_genai as og

parser = argparse.ArgumentParser(description="Texts go on.")
parser.add_argument("text", nargs="+", type=lambda text: text.encode().decode(), help="a text, in UTF-8")
texts = parser.parse_args().text
BEFORE = {before}  # tokens that a text begins with
model = og.Model(str(Path(__file__).parent))
tokenizer = og.Tokenizer(model)
for text in texts:
    ids = [int(token) for token in tokenizer.encode(text)]
    ids = ids if ids[: len(BEFORE)] == BEFORE else BEFORE + ids
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=min({longest}, len(ids) + {new}))
    generator = og.Generator(model, settings)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    new = [int(token) for token in generator.get_sequence(0)][len(ids) :]
    print(text + tokenizer.decode(new))
"""


class Genai:
    """The graph of a step as it is; `genai_config.json` names its inputs and outputs."""

    name: ClassVar[str] = "genai"
    summary: ClassVar[str] = "a language model for onnxruntime-genai (genai_config.json)"
    takes: ClassVar[Takes] = Takes(
        formats=frozenset({"onnx"}),
        targets=frozenset({"ort-cpu"}),
        tasks=frozenset({"language-modeling"}),
        mend="Add the step `- onnx: {target: ort-cpu}` to the recipe.",
    )
    keeps: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Require what the config has words for.

        Raises:
            InputError: layers of different shapes, a tokenizer without tokenizer.json, or no token that ends.
        """
        from smelt.export.package.hub.first_caches import require_float_caches

        require_float_caches(artifact.path, _GRAPH.removesuffix(".onnx"), "onnxruntime-genai")
        _caches(artifact.path)
        if not (artifact.path / "tokenizer.json").is_file():
            raise InputError(
                "it has no tokenizer.json, which onnxruntime-genai reads.", code="unsupported-tokenizer"
            )
        if not _decoding(artifact.path, {}).eos:
            raise InputError(
                "its generation config names no token that ends a text (eos_token_id).",
                code="missing-eos-token",
            )

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Copy graph and tokenizer; write the config and a program.

        Raises:
            InputError: the run's settings of generation are none of this runtime's.
        """
        from smelt.export.package.one_file.read_texts import specials_of
        from smelt.runtime.text.open_tokenizer import open_tokenizer

        config = read_json(artifact.path / "config.json")
        decoding = _decoding(artifact.path, origin.generation)
        before, after = specials_of(open_tokenizer(artifact.path))
        if after:
            raise InputError(
                "its tokenizer puts a token behind each text; onnxruntime-genai's does not.",
                code="unsupported-tokenizer",
            )
        for name in artifact.manifest.files:
            if name not in _LOOPS:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.path / name, folder / name)
        said = genai_config(artifact.path, config, decoding)
        write_json(folder / CONFIG, said)
        tokenizer = read_json(folder / "tokenizer_config.json")
        write_json(
            folder / "tokenizer_config.json",
            tokenizer | {"tokenizer_class": _tokenizer_class(folder)},
        )
        longest = said["model"]["context_length"]
        program = _PROGRAM.format(before=list(before), longest=longest, new=decoding.asked(1))
        (folder / "answer.py").write_text(program, encoding="utf-8")
        notes = (
            f"`{CONFIG}` says greedy search; `set_search_options` says otherwise (`num_beams`, `do_sample`).",
            "Tokens are cut by onnxruntime-genai's own reader of tokenizer.json, which was not compared with"
            " the model's.",
        )
        install = "pip install 'onnxruntime-genai>=0.18'"
        return HowTo(install, 'python answer.py "TEXT"', (("python", f"# answer.py\n{program}"),), notes)


def genai_config(source: Path, config: dict[str, Any], decoding: Decoding) -> dict[str, Any]:
    """Return genai_config.json of the model in `source`.

    Args:
        source: an artifact's folder with model.onnx.
        config: the model's Hugging Face config.
        decoding: how it generates.
    """
    from smelt.runtime.text.limits import NO_LIMIT, position_limit

    layers, heads, width = _caches(source)
    queries = int(config.get("num_attention_heads") or config["n_head"])
    longest = min(position_limit(config) or NO_LIMIT, int(config.get("max_position_embeddings") or NO_LIMIT))
    return {
        "model": {
            "type": _TYPE,
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
            "past_present_share_buffer": False,  # the graph gives caches of its own, as long as they are
            "repetition_penalty": decoding.repetition_penalty,
        },
    }


def _decoding(source: Path, generation: Any) -> Decoding:
    """Return how the model generates.

    Raises:
        InputError: with rules that the config has no words for.
    """
    from smelt.runtime.generate.decoding import settle
    from smelt.runtime.generate.settings import Generation
    from smelt.runtime.runner import read_files

    model: Any = read_files(source)
    found = settle(Generation(**generation), model)
    if found.bad_words_ids or found.no_repeat_ngram_size:
        raise InputError(
            "its generation has bad words or forbids repeated n-grams; this form has no word for it.",
            code="unsupported-generation-setting",
        )
    return found


def _caches(source: Path) -> tuple[int, int, int]:
    """Return the layers of model.onnx in `source`, and heads and width of each layer's keys.

    Raises:
        InputError: layers differ, as after pruning heads.
    """
    from smelt.export.graph_files import read_graph

    graph = read_graph(source / _GRAPH, values=False).graph
    shapes = [
        tuple(int(one.type.tensor_type.shape.dim[axis].dim_value) for axis in (1, 3))
        for one in graph.input
        if one.name.startswith("past_key_values.") and one.name.endswith(".key")
    ]
    if len(set(shapes)) != 1:
        raise InputError(
            "its layers differ in heads; genai_config.json has one number for all.",
            code="unsupported-structure",
        )
    heads, width = shapes[0]
    return len(shapes), heads, width


def _tokenizer_class(folder: Path) -> str:
    """Return the class of the tokenizer in `folder`; of one without any, what its tokenizer.json is like."""
    said = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if said not in _NAMELESS:
        return str(said)
    decoder = read_json(folder / "tokenizer.json").get("decoder") or {}
    return "GPT2Tokenizer" if decoder.get("type") == "ByteLevel" else "LlamaTokenizer"
