"""The stage `quantize`: one scheme for the linear layers, one for the matrices of the vocabulary."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Settings

# What each scheme can be told besides what is quantized.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "int8-dynamic": (),
    "int4": ("group_size", "symmetric", "accuracy_level"),
    "binary": ("group_size", "accuracy_level"),
}


class QuantizeSettings(Settings):
    """What is quantized, and how.

    Group sizes and accuracy levels are those of ONNX Runtime's MatMulNBits; they belong to int4 and
    binary. `head` is the output layer: the product with the vocabulary, or a classifier's last layer.
    """

    scheme: Literal["int8-dynamic", "int4", "binary"] = "int8-dynamic"
    group_size: Literal[16, 32, 64, 128] = Field(
        default=64, description="int4, binary: inputs of a row that share a scale (binary: 32 or more)"
    )
    symmetric: bool = Field(
        default=True, description="int4: zero lies in the middle; false stores zero points"
    )
    accuracy_level: Literal[0, 4] = Field(
        default=4, description="int4, binary: 4 multiplies activations as int8 blocks, 0 as float32"
    )
    skip: list[str] = Field(
        default_factory=list, description="patterns of module names that stay float: `*.decoder.layers.0.*`"
    )
    embeddings: bool = Field(default=True, description="quantize word embeddings")
    head: bool = Field(default=True, description="quantize the output layer")
    vocabulary: Literal["int8-dynamic", "int4"] | None = Field(
        default=None,
        description="scheme of embeddings and head; unless given, int8-dynamic under binary, else the scheme",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        used = {name for scheme in (self.scheme, self.table_scheme) for name in _OPTIONS[scheme]}
        for name in ("group_size", "symmetric", "accuracy_level"):
            if name in self.model_fields_set and name not in used:
                raise ValueError(f"{name} means nothing to scheme {self.scheme}; remove it")
        if self.scheme == "binary" and self.group_size == 16:
            raise ValueError(
                "binary groups hold 32, 64 or 128 weights: ONNX Runtime has no fast 2-bit product of 16"
            )
        return self

    @property
    def table_scheme(self) -> str:
        """The scheme of embeddings and head."""
        return self.vocabulary or ("int8-dynamic" if self.scheme == "binary" else self.scheme)

    def options(self, scheme: str) -> dict[str, int | bool]:
        """Return what `scheme` wants to know, as a quantized layer takes it."""
        return {name: getattr(self, name) for name in _OPTIONS[scheme]}


class Quantize:
    """Turn linear layers and word embeddings into integer codes and scales.

    int8-dynamic: int8 weights per output channel; activations become uint8 while running, one scale for
    the tensor of the whole batch. int4: 4-bit weights, one scale per group of inputs. binary: one bit a
    weight and one scale per group; embeddings and output layer int8. Binary weights need training
    afterwards: put `distill` after this step, it trains through the codes. torch then computes what
    ONNX Runtime will compute. An embedding and an output head that are one matrix stay one.

        - quantize: {scheme: int8-dynamic, skip: ["*.lm_head"]}
        - quantize: {scheme: int4, group_size: 32, symmetric: false}
        - quantize: {scheme: binary, group_size: 64}
    """

    name: ClassVar[str] = "quantize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = (
        "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md); ONNX Runtime,"
        " com.microsoft::MatMulNBits and its quantizer (mlas/lib/q4_dq.cpp); Rastegari et al. 2016,"
        " XNOR-Net, arXiv:1603.05279 (Binary-Weight-Networks)"
    )
    version: ClassVar[int] = 2
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    def __call__(self, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
        """Quantize `src` into `ctx.out`."""
        from smelt.runtime.models.checkpoint import load_model, save_model
        from smelt.runtime.models.stored_dtype import weight_bytes

        model, edits = load_model(src.path)
        if any(edit["op"] == "quantize" for edit in edits):
            raise InputError(
                f"{src.path}: this model is already quantized; quantize it once, after all other steps."
            )
        new = quantize_model(model, settings)
        if not any(edit["op"] == "quantize" for edit in new):
            raise InputError(f"quantize: the patterns in skip {settings.skip} leave no layer to quantize.")
        kept = unused_patterns(model, settings.skip)
        if kept:
            ctx.warnings.append(f"skip: no layer is named {', '.join(kept)}")
        ctx.warnings.extend(save_model(model, edits + new, ctx.out, src.path))
        ctx.facts.update(
            facts_of(model), bytes_before=weight_bytes(src.path), bytes_after=weight_bytes(ctx.out)
        )


def quantize_model(model: Any, settings: QuantizeSettings) -> list[dict[str, Any]]:
    """Quantize `model` in place; return the edits that make room for the result.

    Raises:
        InputError: a layer's weights are not finite.
    """
    from torch import nn

    from smelt.compress.quantize.schemes import quantize_module
    from smelt.runtime.layers.quantized import is_table
    from smelt.runtime.models.structure import names_of, replace_layer

    head = output_layer(model)
    words = {id(m.weight) for m in word_embeddings(model)}
    # by the weight's identity: the first module quantized from it
    done: dict[int, tuple[str, Any]] = {}
    edits: list[dict[str, Any]] = []
    for module, names in names_of(model).items():
        name = names[0]
        if any(fnmatchcase(n, pattern) for n in names for pattern in settings.skip):
            continue
        if isinstance(module, nn.Linear):
            if module is head and not settings.head:
                continue
        elif not (is_table(module) and settings.embeddings and id(module.weight) in words):
            continue
        table = module is head or not isinstance(module, nn.Linear)
        scheme = settings.table_scheme if table else settings.scheme
        options = settings.options(scheme)
        try:
            new = quantize_module(module, scheme, **options)
        except InputError as error:
            raise InputError(f"quantize: {name}: {error}") from error
        first_name, first = done.setdefault(id(module.weight), (name, new))
        edit = {"op": "quantize", "module": name, "scheme": scheme, **options}
        replace_layer(model, edits, name, new, edit)
        if first is not new:
            new.matrix = first.matrix
            edits.append({"op": "share", "module": f"{name}.matrix", "with": f"{first_name}.matrix"})
    return edits


def output_layer(model: Any) -> Any:
    """Return the layer that gives the logits: the product with the vocabulary, or a classifier's last."""
    from torch import nn

    head = model.get_output_embeddings()
    if head is None and type(model).__name__.endswith("ForSequenceClassification"):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        head = next((m for m in reversed(linears) if m.out_features == model.config.num_labels), None)
    return head


def word_embeddings(model: Any) -> list[Any]:
    """Return the embeddings that token ids are looked up in (not positions, not token types)."""
    from smelt.runtime.layers.quantized import is_table

    found = [model.get_input_embeddings()]
    if model.config.is_encoder_decoder:
        found += [model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()]
    return [m for m in found if is_table(m)]


def facts_of(model: Any) -> dict[str, Any]:
    """Return what the report should tell of a quantized model.

    `bits_per_weight` counts codes, scales and zero points of the quantized matrices, each once;
    `padded_layers` are those whose last group is filled up, because their inputs are no multiple of it.
    """
    from torch import nn

    from smelt.runtime.layers.quantized import AnyEmbedding, AnyLinear, matrix_bytes

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, AnyLinear | AnyEmbedding)]
    matrices = {id(m.matrix): (m.matrix, m) for _, m in layers}
    bits = 8 * matrix_bytes(nn.ModuleList(matrix for matrix, _ in matrices.values()))
    weights = sum(
        m.in_features * m.out_features if isinstance(m, AnyLinear) else m.num_embeddings * m.embedding_dim
        for _, m in matrices.values()
    )
    padded = [
        n for n, m in layers if isinstance(m, AnyLinear) and m.in_features % m.options().get("group_size", 1)
    ]
    return {
        "linear_layers": sum(isinstance(m, AnyLinear) for _, m in layers),
        "embeddings": sum(isinstance(m, AnyEmbedding) for _, m in layers),
        "float_linear_layers": [n for n, m in model.named_modules() if isinstance(m, nn.Linear)],
        "padded_layers": padded,
        "bits_per_weight": round(bits / weights, 3),
    }


def unused_patterns(model: Any, patterns: list[str]) -> list[str]:
    """Return the patterns that no module's name matches."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
