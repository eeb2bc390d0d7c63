"""Quantization-aware training: float master weights for the layers of a quantized model.

During training, each quantized layer computes with fake-quantized weights, and the gradient updates the float
master weights (straight-through, see the scheme's module). Afterwards the weights are quantized again.
Biases, norms and float layers train as usual.

The master weights start from those stored by an earlier training; else from the weights before `quantize`, so
that a weight near a rounding boundary can cross it soon; if these are not available or have other scales
(AWQ), from the dequantized weights. Afterwards they are stored next to the model
(`write_master_weights`), but are not part of it.

Scales are computed from the weights in each update, or learned with them (compress/quantize/step_sizes.py).

Weights are fake-quantized in every scheme, activations if the scheme quantizes them, so that training
computes what is deployed: the int8 blocks of MatMulNBits too, and the 4-bit ones of `activation_bits`.

`latent.safetensors` stores the master weights: a float32 tensor [N, K] for each quantized matrix, by the
first name of a layer with it in the model, and the SHA-256 of the `model.safetensors` that was quantized from
them. Only training reads it: it is not counted in sizes and not part of packages.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.model_input import require_no_codebooks
from smelt.compress.quantize.methods import AWQ_METHODS
from smelt.compress.quantize.plan_layers import (
    fake_quantize,
    fake_quantize_activations,
    quantize_into,
    quantized_weight_bits,
    round_to_nearest,
    straight_through,
)
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.quantize.step_sizes import StepSizes
from smelt.core.artifact import MASTER_WEIGHTS_FILE, Artifact
from smelt.core.errors import InputError
from smelt.core.files import sha256_of
from smelt.core.messages import Message, warning
from smelt.core.process_group import process_rank
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import Edit, fold_batch_norms, is_masked, mark_masked, replace_module
from smelt.models.empty_model import stored_dtypes
from smelt.models.layers import LowRankCorrectedLinear
from smelt.models.weight_files import WEIGHTS_FILE
from smelt.quantization.layers import (
    QuantizedConv2d,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedMatrix,
    copy_embed_scale,
    is_quantized,
)
from smelt.stage import Context, StoredDtype
from smelt.training.extension import Objective, TrainingExtension

_MODEL_HASH_KEY = "model"  # in the file's metadata: the hash of the weights that it belongs to
_REBUILD_HINT = "Run the step that wrote this file again with --rebuild."


def write_master_weights(weights: Mapping[str, Tensor], folder: Path) -> int:
    """Write the float32 master `weights` of the quantized model in `folder`; return the number of bytes."""
    path = folder / MASTER_WEIGHTS_FILE
    tensors = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    # one entry: safetensors writes several in any order, and the bytes are part of the next training's key
    save_file(tensors, path, metadata={_MODEL_HASH_KEY: sha256_of(folder / WEIGHTS_FILE)})
    return path.stat().st_size


def read_master_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor] | None, Message | None]:
    """Return the stored master weights of a model, and a warning if they do not match it.

    Args:
        folder: folder of the artifact.
        shapes: shapes (N, K) of the model's quantized matrices, by the first name of each.

    Returns:
        The weights, float32, or None if none are stored or they belong to another model; and a warning if the
        file exists and does not match, else None.

    Raises:
        InputError: the file cannot be read, or holds values that are not finite.
    """
    path = folder / MASTER_WEIGHTS_FILE
    if not path.is_file():
        return None, None
    try:
        with safe_open(path, "pt") as opened:
            model_hash = (opened.metadata() or {}).get(_MODEL_HASH_KEY)
            stored_shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
            mismatch = _mismatch_warning(model_hash, stored_shapes, folder, shapes)
            if mismatch is not None:
                return None, mismatch
            weights = {name: opened.get_tensor(name).float() for name in stored_shapes}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a readable safetensors file: {error}. {_REBUILD_HINT}",
            code="damaged-file",
            file=str(path),
        ) from error
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(
                f"{path}: the weights of '{name[:80]}' are not all finite numbers. {_REBUILD_HINT}",
                code="non-finite-weights",
                file=str(path),
            )
    return weights, None


def _mismatch_warning(
    model_hash: str | None,
    stored_shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
) -> Message | None:
    """Return a warning if the file does not belong to the model in `folder`, else None."""
    path, consequence = folder / MASTER_WEIGHTS_FILE, f"so they are not used. {_REBUILD_HINT}"
    if stored_shapes != dict(shapes):
        mismatched = next(
            n for n in sorted({*stored_shapes, *shapes}) if stored_shapes.get(n) != shapes.get(n)
        )
        return warning(
            "master-weights-mismatch",
            f"{path}: the master weights do not match this model ('{mismatched[:80]}'), {consequence}",
        )
    if model_hash != sha256_of(folder / WEIGHTS_FILE):
        return warning(
            "master-weights-outdated",
            f"{path}: these master weights belong to another {WEIGHTS_FILE}, {consequence}",
        )
    return None


_Layer = TypeVar("_Layer", QuantizedLinear, QuantizedConv2d, QuantizedEmbedding)


class _QatModule(nn.Module, Generic[_Layer]):
    """A quantized layer with float master weights.

    untrained: no update was kept, so the quantized weights are those of `quantized`. as_came: compute with
    these.
    """

    weight: Tensor

    def _attach(self, home: _Layer, weight: nn.Parameter) -> None:
        self.weight = weight
        self._home: list[_Layer] = [home]  # in a list, so that it is not registered as a submodule
        self._steps: list[StepSizes] = []
        self.untrained, self.as_came = True, False

    @property
    def step_sizes(self) -> StepSizes | None:
        """The learned scales, None without."""
        return self._steps[0] if self._steps else None

    def learn_step_sizes(self, steps: StepSizes) -> None:
        """Compute with `step_sizes` from now on."""
        self._steps[:] = [steps]

    @property
    def quantized(self) -> _Layer:
        """The quantized layer, which is restored after training.

        It is not a submodule, so `model.to` does not move it.
        """
        home = self._home[0]
        return home if home.matrix.codes.device == self.weight.device else home.to(self.weight.device)


class QatLinear(_QatModule[QuantizedLinear], nn.Linear):
    """A Linear with float master weights that computes like the quantized layer made from them."""

    def __init__(self, home: QuantizedLinear, weight: nn.Parameter) -> None:
        super().__init__(home.in_features, home.out_features, home.bias is not None, device="meta")
        if home.bias is not None:
            self.bias = nn.Parameter(home.bias.detach().clone())
        self._attach(home, weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        if self.as_came:
            x = fake_quantize_activations(x, self.quantized.matrix)
            return F.linear(x, self.quantized.matrix.dequantize(), self.bias)
        if self.step_sizes is not None:
            return F.linear(
                self.step_sizes.fake_quantize_activations(x),
                self.step_sizes.fake_quantize(self.weight),
                self.bias,
            )
        x = fake_quantize_activations(x, self.quantized.matrix)
        return F.linear(x, fake_quantize(self.weight, self.quantized.matrix), self.bias)


class QatConv2d(_QatModule[QuantizedConv2d]):
    """A Conv2d with a float master kernel that computes like the quantized convolution made from it.

    Inputs are rounded with the calibrated range, also if scales are learned.
    """

    def __init__(self, home: QuantizedConv2d, weight: nn.Parameter) -> None:
        super().__init__()
        self._attach(home, weight)
        self.stride, self.kernel_size, self.dilation = home.stride, home.kernel_size, home.dilation
        self.bias = None if home.bias is None else nn.Parameter(home.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, h, w] to [B, T, h', w']."""
        layer, steps = self.quantized, self.step_sizes
        with torch.no_grad():
            quantized_input = layer.fake_quantize_input(x)
        x = straight_through(x, quantized_input)
        if self.as_came:
            return layer.convolve(x, layer.matrix.dequantize(), self.bias)
        weight = (
            fake_quantize(self.weight, layer.matrix) if steps is None else steps.fake_quantize(self.weight)
        )
        return layer.convolve(x, weight, self.bias)


class QatEmbedding(_QatModule[QuantizedEmbedding], nn.Embedding):
    """An Embedding with float master weights that computes like the quantized embedding made from them."""

    def __init__(self, home: QuantizedEmbedding, weight: nn.Parameter) -> None:
        super().__init__(home.num_embeddings, home.embedding_dim, home.padding_idx, device="meta")
        self._attach(home, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Map int64 [...] to [..., D]; if rows are independent, quantize only those that are looked up."""
        matrix, steps = self.quantized.matrix, self.step_sizes
        if self.as_came:
            return F.embedding(input, matrix.dequantize(), self.padding_idx)
        if not matrix.is_row_independent():
            weight = fake_quantize(self.weight, matrix) if steps is None else steps.fake_quantize(self.weight)
            return F.embedding(input, weight, self.padding_idx)
        ids = input.flatten()
        rows = F.embedding(ids, self.weight, self.padding_idx)
        embedded = fake_quantize(rows, matrix) if steps is None else steps.fake_quantize(rows, ids)
        return embedded.reshape(*input.shape, self.embedding_dim)


QatLayer: TypeAlias = QatLinear | QatConv2d | QatEmbedding


def load_trainable(src: Artifact, ctx: Context, adapters: bool = False) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode), ready to train, and its edits.

    A quantized model is prepared by `prepare_qat`; `convert_qat` quantizes it again. With `adapters`, the
    quantized weights are fixed.
    """
    model, edits = load_model(src.path)
    if not adapters and any(edit.get("op") == "quantize" for edit in edits):
        require_no_codebooks(edits, "finetune")
        master_weights, message = read_master_weights(src.path, _matrix_shapes(model))
        if message is not None:
            ctx.warnings.append(message)
        if master_weights is not None:
            ctx.details["latent_weights"] = "kept"
            prepare_qat(model, None, master_weights)
            return model, edits
        parent = _float_parent(src, ctx.ancestors)
        ctx.details["latent_weights"] = parent[0] if parent else "codes"
        float_model = load_model(parent[1].path)[0] if parent else None
        if float_model is not None and any(edit.get("op") == "fold" for edit in edits):
            fold_batch_norms(float_model)
        prepare_qat(model, float_model)
    return model, edits


def find_master_weights(
    model: nn.Module, src: Artifact, ctx: Context, of_parent: bool
) -> dict[int, Tensor] | None:
    """Return the master weights of `model`, float32 [N, K], by the identity of the matrix.

    Args:
        model: the quantized model of `src`.
        src: the artifact, which may contain stored master weights.
        ctx: the context of the stage.
        of_parent: whether the weights before `quantize` may be used.

    Returns:
        The master weights; None if they are unknown.
    """
    stored, message = read_master_weights(src.path, _matrix_shapes(model))
    if message is not None:
        ctx.warnings.append(message)
    parent = _float_parent(src, ctx.ancestors) if stored is None and of_parent else None
    float_model = load_model(parent[1].path)[0] if parent else None
    if stored is None and float_model is None:
        return None
    by_matrix: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_quantized(module) and id(module.matrix) not in by_matrix:
            weight = (
                stored[name]
                if stored is not None
                else _initial_weight(cast("nn.Module", float_model), model, name)
            )
            by_matrix[id(module.matrix)] = weight.detach().float()
    return by_matrix


def _float_parent(src: Artifact, ancestors: Mapping[str, Artifact]) -> tuple[str, Artifact] | None:
    """Return name and artifact of the float model that `src` was quantized from, None if there is none."""
    settings = src.manifest.settings
    moves_scales = settings.get("method") in AWQ_METHODS or settings.get("smoothquant_alpha") is not None
    if src.manifest.stage != "quantize" or moves_scales:
        return None  # scales of columns and rows are not stored
    return next(((n, a) for n, a in ancestors.items() if a.key == src.manifest.parent), None)


def _matrix_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return (N, K) of each quantized matrix, by the first name of a layer with it."""
    shapes: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_quantized(module):
            shapes.setdefault(id(module.matrix), (name, (len(module.matrix.codes), module.matrix.width)))
    return dict(shapes.values())


def prepare_qat(
    model: nn.Module, float_model: nn.Module | None, master_weights: Mapping[str, Tensor] | None = None
) -> None:
    """Replace every quantized layer of `model` by one with float master weights, in place.

    Args:
        model: layers that share a matrix will share the master weights too.
        float_model: the model before quantization, with the same module names; None to start from the
            dequantized weights.
        master_weights: float32 [N, K] by the first name of each matrix, stored by an earlier training.
    """
    weights: dict[int, nn.Parameter] = {}
    replacements: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not is_quantized(module):
            continue
        if id(module.matrix) not in weights:
            if master_weights is not None:
                start = master_weights[name]
            else:
                start = (
                    module.matrix.dequantize()
                    if float_model is None
                    else _initial_weight(float_model, model, name)
                )
            start = start.detach().flatten(1).clone()
            if is_masked(module):  # stored weights have the zeros; else each quantized 0 is a permanent zero
                start = (
                    start.masked_fill(module.matrix.dequantize() == 0, 0.0)
                    if master_weights is None
                    else start
                )
            weights[id(module.matrix)] = nn.Parameter(start)
        weight = weights[id(module.matrix)]
        if id(module) not in replacements:
            kind: Any = QatLinear if isinstance(module, QuantizedLinear) else QatEmbedding
            kind = QatConv2d if isinstance(module, QuantizedConv2d) else kind
            replacements[id(module)] = kind(module, weight)
            copy_embed_scale(replacements[id(module)], module)
            if is_masked(module):
                mark_masked(replacements[id(module)])
        replace_module(model, name, replacements[id(module)].train(module.training))


def _initial_weight(floats: nn.Module, model: nn.Module, name: str) -> Tensor:
    """Return the initial master weight of the layer `name` of `model`, float32 [N, K].

    With a low-rank correction, the correction is subtracted.
    """
    owner, _, attribute = name.rpartition(".")
    corrected = model.get_submodule(owner) if attribute == "coded" else None
    if isinstance(corrected, LowRankCorrectedLinear):
        pair = corrected.adapter
        return cast("Tensor", floats.get_submodule(owner).weight) - pair.up.weight @ pair.down.weight
    return cast("Tensor", floats.get_submodule(name).weight)


def save_trained(
    model: Any, edits: list[Edit], src: Path, dtype: StoredDtype, qat: QatSettings | None, ctx: Context
) -> None:
    """Convert a trained model, and write it and its master weights to `ctx.out`.

    `ctx.details["latent_bytes"]` is the size of the master weights, `ctx.details["bits_per_weight"]` the mean
    bits per quantized weight.

    Args:
        model: the trained model from `load_trainable`; its quantized layers are restored.
        edits: the edits of the model.
        src: the folder that defines the stored dtypes.
        dtype: of the stored float weights.
        qat: settings of the quantization-aware training.
        ctx: the context of the stage.
    """
    if process_rank():  # of several processes that train, process 0 writes
        return
    weights = convert_qat(model, ctx)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src, dtype))
    if any(is_quantized(module) for module in model.modules()):
        ctx.details["bits_per_weight"] = quantized_weight_bits(model, stored_dtypes(ctx.out).default.itemsize)
    if weights and (qat is None or qat.save_master_weights):
        ctx.details["latent_bytes"] = write_master_weights(weights, ctx.out)


def convert_qat(model: nn.Module, ctx: Context) -> dict[str, Tensor]:
    """Quantize the trained weights, and restore the quantized layers in place.

    `ctx.details["codes_changed"]` is the fraction of quantized weights that changed.

    Returns:
        The master weights of each matrix, float32 [N, K], by the first name of a layer with it.
    """
    latents = qat_layers(model)
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, latent in latents:
        weights.setdefault(id(latent.quantized.matrix), (name, latent.weight.detach()))
    codes_before = {id(m.quantized.matrix): _flat_codes(m.quantized.matrix) for _, m in latents}
    _restore_quantized(model, latents, {name: latent.quantized for name, latent in latents})
    if latents:
        codes_after = {id(m.quantized.matrix): _flat_codes(m.quantized.matrix) for _, m in latents}
        num_changed = sum(
            int((codes_after[matrix_id] != codes_before[matrix_id]).sum()) for matrix_id in codes_before
        )
        total = sum(codes.numel() for codes in codes_before.values())
        ctx.details["codes_changed"] = round(num_changed / max(1, total), 4)
    return dict(weights.values())


@contextlib.contextmanager
def as_converted(model: nn.Module) -> Iterator[None]:
    """Convert `model` in this context as `convert_qat` does; the original layers are not changed."""
    latents = qat_layers(model)
    # in one copy, so that layers which share a matrix still share it
    _restore_quantized(model, latents, copy.deepcopy({name: latent.quantized for name, latent in latents}))
    try:
        yield
    finally:
        for name, latent in latents:
            replace_module(model, name, latent)


@contextlib.contextmanager
def with_original_weights(model: nn.Module) -> Iterator[None]:
    """Use the original quantized weights in this context, as long as no training update was kept."""
    latents = [latent for _, latent in qat_layers(model) if latent.untrained]
    for latent in latents:
        latent.as_came = True
    try:
        yield
    finally:
        for latent in latents:
            latent.as_came = False


class QuantizedWeights:
    """The quantized weights of a model in training, as a technique of the training loop.

    Checkpoints are scored with quantized weights, and the initial ones as they came.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` unchanged."""
        return objective

    def extension(self) -> TrainingExtension:
        """Return the extension of the training."""
        return TrainingExtension(
            as_stored=partial(as_converted, self.model),
            as_incoming=partial(with_original_weights, self.model),
        )

    def finalize(self, ctx: Context) -> None:
        """Mark the model as trained, unless the initial weights were kept."""
        if ctx.details.get("training", {}).get("kept_step", 1):
            mark_trained(self.model)


def mark_trained(model: nn.Module) -> None:
    """Mark `model` as trained: its weights are quantized from the master weights from now on."""
    for _, latent in qat_layers(model):
        latent.untrained = False


def qat_layers(model: nn.Module) -> list[tuple[str, QatLayer]]:
    """Return the layers with master weights; shared layers appear under each name."""
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QatLayer)
    ]


def _restore_quantized(
    model: nn.Module,
    latents: list[tuple[str, QatLayer]],
    homes: Mapping[str, QuantizedLayer],
) -> None:
    """Quantize the weights of `latents` into `homes`, and insert these into `model`."""
    quantized: set[int] = set()
    for name, latent in latents:
        layer, steps = homes[name], latent.step_sizes
        if id(layer.matrix) not in quantized and not (
            latent.untrained and (latent.as_came or layer is latent.quantized)
        ):
            with torch.no_grad():
                quantize_into(
                    layer.matrix, latent.weight, round_to_nearest if steps is None else steps.quantizer()
                )
                if steps is not None:
                    steps.store_range(layer.matrix)
            quantized.add(id(layer.matrix))
        if isinstance(latent, QatEmbedding) or isinstance(layer, QuantizedEmbedding):
            pass  # without a bias
        elif layer.bias is not None and latent.bias is not None:
            layer.bias.data = latent.bias.detach().clone()
        replace_module(model, name, layer.train(latent.training))


def _flat_codes(matrix: QuantizedMatrix) -> Tensor:
    """Return the unpacked quantized weights, flattened."""
    return matrix.unpack().q_weight.clone()
