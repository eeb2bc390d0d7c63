"""Dynamic int8 quantization: int8 weights, activations quantized while running. Needs no data."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Settings


class QuantizeSettings(Settings):
    """What is quantized.

    skip: patterns of module names that stay float, e.g. `*.decoder.layers.0.*`.
    embeddings: whether word embeddings become int8 rows. head: whether the output layer becomes int8.
    """

    scheme: Literal["int8-dynamic"] = "int8-dynamic"
    skip: list[str] = Field(default_factory=list)
    embeddings: bool = True
    head: bool = True


class Quantize:
    """Turn linear layers and word embeddings into int8 (scheme int8-dynamic).

    Weights: per output channel, symmetric. Activations: uint8, one scale for the tensor of the whole
    batch, found while running. torch then computes what ONNX Runtime will compute. An embedding and
    an output head that are one matrix stay one.

        - quantize: {scheme: int8-dynamic, skip: ["*.lm_head"]}
    """

    name: ClassVar[str] = "quantize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = (
        "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md); ONNX Runtime,"
        " 'Quantize ONNX models', dynamic quantization (onnxruntime.ai)"
    )
    version: ClassVar[int] = 1
    settings_type: ClassVar[type[Settings]] = QuantizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    def __call__(self, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
        """Quantize `src` into `ctx.out`."""
        from smelt.runtime.checkpoint import load_model, save_model
        from smelt.runtime.quantized import QuantizedEmbedding, QuantizedLinear

        model, edits = load_model(src.path)
        if any(edit["op"] == "quantize" for edit in edits):
            raise InputError(
                f"{src.path}: this model is already quantized; quantize it once, after all other steps."
            )
        before = stored_bytes(model)
        new = quantize_model(model, settings)
        if not any(edit["op"] == "quantize" for edit in new):
            raise InputError(f"quantize: the patterns in skip {settings.skip} leave no layer to quantize.")
        kept = unused_patterns(model, settings.skip)
        if kept:
            ctx.warnings.append(f"skip: no layer is named {', '.join(kept)}")
        ctx.facts.update(
            linear_layers=sum(isinstance(m, QuantizedLinear) for m in model.modules()),
            embeddings=sum(isinstance(m, QuantizedEmbedding) for m in model.modules()),
            float_linear_layers=[n for n, _ in _float_linears(model)],
            bytes_before=before,
            bytes_after=stored_bytes(model),
        )
        save_model(model, edits + new, ctx.out, src.path)


def quantize_model(model: Any, settings: QuantizeSettings) -> list[dict[str, Any]]:
    """Quantize `model` in place; return the edits that make room for the result."""
    from torch import nn

    from smelt.runtime.quantized import QuantizedEmbedding, QuantizedLinear, quantize_module
    from smelt.runtime.structure import replace_module

    head = model.get_output_embeddings()
    words = {id(m.weight) for m in word_embeddings(model)}
    done: dict[
        int, tuple[str, nn.Module]
    ] = {}  # by the weight's identity: the first module quantized from it
    edits: list[dict[str, Any]] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if any(fnmatchcase(name, pattern) for pattern in settings.skip):
            continue
        if isinstance(module, nn.Linear):
            if module is head and not settings.head:
                continue
        elif not (type(module) is nn.Embedding and settings.embeddings and id(module.weight) in words):
            continue
        first_name, first = done.setdefault(id(module.weight), (name, module))
        if first is module:
            new = quantize_module(module, settings.scheme)
            replace_module(model, name, new)
            done[id(module.weight)] = (name, new)
            edits.append({"op": "quantize", "module": name, "scheme": settings.scheme})
            continue
        new = quantize_module(module, settings.scheme)
        assert isinstance(first, QuantizedLinear | QuantizedEmbedding)
        new.matrix = first.matrix
        replace_module(model, name, new)
        edits.append({"op": "quantize", "module": name, "scheme": settings.scheme})
        edits.append({"op": "share", "module": f"{name}.matrix", "with": f"{first_name}.matrix"})
    return edits


def word_embeddings(model: Any) -> list[Any]:
    """Return the embeddings that token ids are looked up in (not positions, not token types)."""
    from torch import nn

    found = [model.get_input_embeddings()]
    if model.config.is_encoder_decoder:
        found += [model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()]
    return [m for m in found if type(m) is nn.Embedding]


def stored_bytes(model: Any) -> int:
    """Return the bytes of the model's parameters, shared ones counted once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def unused_patterns(model: Any, patterns: list[str]) -> list[str]:
    """Return the patterns that no module's name matches."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]


def _float_linears(model: Any) -> list[tuple[str, Any]]:
    from torch import nn

    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
