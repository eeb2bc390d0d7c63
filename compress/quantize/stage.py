"""The stage `quantize`: one scheme for the linear layers, one for the matrices of the vocabulary."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, ClassVar

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Settings
from smelt.runtime.schemes.registry import SCHEMES, bits_per_weight, defaults, targets_of
from smelt.runtime.schemes.scheme import Scheme


class Quantize:
    """Turn linear layers and word embeddings into integer codes and scales.

    torch then computes what the runtime will compute. An embedding and an output head that are one matrix
    stay one. Where a scheme needs training afterwards, put `distill` after this step: it trains through the
    codes.

        - quantize: {scheme: int8-dynamic, skip: ["*.lm_head"]}
        - quantize: {scheme: int4, group_size: 32, symmetric: false}
        - quantize: {scheme: binary, group_size: 64}
    """

    name: ClassVar[str] = "quantize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "; ".join(scheme.source for scheme in SCHEMES.values())
    version: ClassVar[int] = 2
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def more_help(cls) -> str:
        """Return what `smelt stages quantize` says of each scheme."""
        return "\n\n".join(_help_of(scheme) for scheme in SCHEMES.values())

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


def _help_of(scheme: Scheme) -> str:
    bits = f"{bits_per_weight(scheme, defaults(scheme)):.3g} bits a weight"
    needs = "; needs training afterwards" if scheme.trained else ""
    tables = "" if scheme.tables else f"; embeddings and output layer become {scheme.vocabulary}"
    fit = ", ".join(targets_of([scheme]))
    return f"{scheme.name} ({bits}; runs on {fit}): {scheme.summary}{tables}{needs}."


def quantize_model(model: Any, settings: QuantizeSettings) -> list[dict[str, Any]]:
    """Quantize `model` in place; return the edits that make room for the result.

    Raises:
        InputError: a layer's weights are not finite.
    """
    from torch import nn

    from smelt.compress.quantize.coding import quantize_module
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
            new = quantize_module(module, scheme, options)
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

    from smelt.runtime.layers.quantized import QuantizedLinear, is_quantized, matrix_bytes

    layers = [(name, m) for name, m in model.named_modules() if is_quantized(m)]
    linears = [(name, m) for name, m in layers if isinstance(m, QuantizedLinear)]
    matrices = {id(m.matrix): m.matrix for _, m in layers}
    bits = 8 * matrix_bytes(nn.ModuleList(matrices.values()))
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices.values())
    return {
        "linear_layers": len(linears),
        "embeddings": len(layers) - len(linears),
        "float_linear_layers": [n for n, m in model.named_modules() if isinstance(m, nn.Linear)],
        "padded_layers": [name for name, m in linears if _is_padded(m.matrix)],
        "bits_per_weight": round(bits / weights, 3),
    }


def _is_padded(matrix: Any) -> bool:
    """Say whether the last group of a matrix is filled up."""
    return bool(matrix.width % matrix.scheme.group(matrix.width, matrix.options))


def unused_patterns(model: Any, patterns: list[str]) -> list[str]:
    """Return the patterns that no module's name matches."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
