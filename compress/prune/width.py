"""Pruning of the hidden width: remove the least important channels from every tensor, and refit the model.

For the refit, the narrow model runs block by block in parallel with the original one on calibration samples,
encoder first. A linear layer W x + b that read the states x now reads the narrow states x', after all earlier
fits; this is a least-squares problem:

    minimize  sum |W x + b - W' x' - b'|^2 + e |W' - W_k|^2
    W' = W_k + (W M_xx' - W_k M_x'x') (M_x'x' + e I)^-1

M are second moments, around the means if there is a bias; k are the kept channels; e is 1 % of the mean of
M_x'x''s diagonal. A norm whose output is the hidden states (post-norm, an opening or closing norm) gets the
scale and shift per channel with the least error to the original norm's output. A matrix is only cut, not
refitted, if it is also an embedding (a tied head), if its zeros have to be kept, or if blocks share it and it
was fitted before. For a tied head E, cut from W, the last norm y gets the scale s with the least error of the
logits instead:

    minimize  sum |W x - E (s * y)|^2 + e |s - 1|^2
    s = ((E^T E) * M_yy + e I)^-1 (diag(E^T W M_xy) + e)

It is left where this does not bring the output probabilities nearer to the original's, on held-back samples.

Shapes: T = tokens, D = channels before, k = after, N = outputs of a linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from smelt.calibration.run_blocks import run_blocks
from smelt.calibration.samples import CalibrationSamples, observe_inputs
from smelt.calibration.sequential import RunningBlock
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.importances.scores import ScoredModel
from smelt.compress.prune.reconstruct import RECONSTRUCTION_DAMPING, bias_owner, load_reconstruction_samples
from smelt.compress.prune.settings import PruneSettings, count_kept_channels, fixed_width_error
from smelt.compress.prune.units import linear_with_inputs, whole_weight
from smelt.compress.quantize.requantize import dequantize_model, save_requantized
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.models.checkpoint import count_stored_parameters, load_model
from smelt.models.edits import is_masked
from smelt.models.families.layout import Attention, FeedForward
from smelt.models.families.registry import Block, blocks_of, family_of, has_norm_at, output_modules
from smelt.models.hidden_width import hidden_width, prune_hidden_width, write_width_to_config
from smelt.stage import Context


@dataclass(frozen=True)
class RefitNorm:
    """A norm whose output is the hidden states."""

    name: str


@dataclass(frozen=True)
class RefitLayers:
    """Linear layers that read the same states. reads_encoder: whether they read encoder outputs."""

    names: tuple[str, ...]
    reads_encoder: bool = False


RefitPoint: TypeAlias = RefitNorm | RefitLayers


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer of the original model and of the narrow one for the same tokens.

    old: float32 [T, D]. new: float32 [T, k]. judged: both, of the samples held back from calibration.
    """

    old: Tensor
    new: Tensor
    judged: tuple[Tensor, Tensor] | None = None


# Maximum number of tokens whose states are stored for a fit, and whose output probabilities are compared.
MAX_REFIT_TOKENS = 32768
_MAX_JUDGED_TOKENS = 1024
_JUDGED_AT_ONCE = 64  # tokens, because logits of large vocabularies need much memory


def refit_width(
    model: Any, narrow_model: Any, keep: Tensor, samples: CalibrationSamples, ctx: Context
) -> dict[str, float]:
    """Refit the layers of `narrow_model` that read hidden states, and the norms that output them, to `model`.

    Args:
        model: the original model, float32, in eval mode, on the CPU; not changed.
        narrow_model: the model with only the channels `keep`; changed in place.
        keep: int64 [k], ascending.
        samples: calibration samples for both.
        ctx: device, threads, progress.

    Returns:
        By layer, the squared output error relative to that of the plain cut, as in `refit_narrow_layer`.
    """
    refit = _WidthRefit(model, narrow_model, keep, samples, ctx)
    blocks = zip(
        run_blocks(model, samples, ctx, stage="prune"),
        run_blocks(narrow_model, samples, ctx, stage="prune"),
        strict=True,
    )
    for old_block, new_block in blocks:
        refit.refit_block(old_block, new_block)
    refit.refit_outputs()
    return {name: round(value, 4) for name, value in refit.left.items()}


class _WidthRefit:
    """State of the refit of a narrow model to the original one."""

    def __init__(
        self, original_model: Any, cut: Any, keep: Tensor, samples: CalibrationSamples, ctx: Context
    ) -> None:
        self.models, self.keep, self.rows, self.ctx = (original_model, cut), keep, samples, ctx
        self.stride = max(1, -(-samples.tokens // MAX_REFIT_TOKENS))
        self.left: dict[str, float] = {}
        self.done: set[nn.Module] = set()
        self.tables = {id(p) for m in cut.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        self.encoded: LayerInputs | None = None  # encoder outputs, read by cross-attention

    def refit_block(self, before: RunningBlock, after: RunningBlock) -> None:
        """Fit one block, part by part; the original block runs once."""
        points = _refit_points(after.block)
        targets, judged_targets = (self._observe(0, points, before, held_back) for held_back in (False, True))
        norm_output: Tensor | None = None  # output of the last norm, the input of the next part
        for point in points:
            if isinstance(point, RefitNorm):
                normalized = self.refit_norm(point, targets[point], after)
                norm_output = None if after.block.stack.stream.pre_norm else normalized
            elif point.reads_encoder and self.encoded is not None:
                self.refit_layers(point, self.encoded)
            else:
                # layers that later blocks share are fitted on all uses
                has_norm = norm_output is not None and len(norm_output) == len(targets[point])
                inputs = norm_output if has_norm else None
                pair = self._inputs_of_both(point, targets, judged_targets, inputs, after)
                if point.reads_encoder:
                    self.encoded = pair
                self.refit_layers(point, pair)

    def _inputs_of_both(
        self,
        point: RefitLayers,
        targets: dict[RefitPoint, Tensor],
        judged_targets: dict[RefitPoint, Tensor],
        inputs: Tensor | None,
        run: RunningBlock | None,
    ) -> LayerInputs:
        """Return the inputs of both models at `point`; of the narrow one on calibration samples, if known."""
        if inputs is None:
            inputs = self._observe(1, [point], run)[point]
        judged = None
        if self.rows.held_back is not None:
            judged = judged_targets[point], self._observe(1, [point], run, held_back=True)[point]
        return LayerInputs(targets[point], inputs, judged)

    def refit_outputs(self) -> None:
        """Fit the final norm and the head after the last block."""
        model = self.models[1]
        family: Any = family_of(model)
        closing = family.stacks(model.config.to_dict())[-1].stream.final_norm
        if closing:
            point = RefitNorm(closing)
            self.refit_norm(point, self._observe(0, [point], None)[point], None)
        for name in output_modules(model)[:1]:
            if has_norm_at(model, name):
                continue
            is_tied = id(linear_with_inputs(model, name).weight) in self.tables
            norm = closing or _last_norm(model)
            if not (self._can_be_fitted(name) or (is_tied and norm)):
                continue
            reader = RefitLayers((name,))
            targets = self._observe(0, [reader], None)
            judged_targets = self._observe(0, [reader], None, held_back=True)
            pair = self._inputs_of_both(reader, targets, judged_targets, None, None)
            if is_tied:
                self.left[name] = self._refit_norm_to_logits(str(norm), name, pair)
            else:
                self.refit_layers(reader, pair)

    def _refit_norm_to_logits(self, norm: str, head: str, inputs: LayerInputs) -> float:
        """Fit the last norm to the logits of a tied head, if the output probabilities improve."""
        family: Any = family_of(self.models[1])
        config = self.models[1].config.to_dict()
        divisor = family.logits_divisor(config)
        old_weight, weight = (whole_weight(model, head) / divisor for model in self.models)
        module: Any = self.models[1].get_submodule(norm)
        has_bias = getattr(module, "bias", None) is not None
        scale, shift, left = fit_logits(old_weight, weight, inputs, has_bias)
        old, new = (x.double()[:_MAX_JUDGED_TOKENS] for x in inputs.judged or (inputs.old, inputs.new))
        bias = _logits_bias(self.models[0], head)
        before, after = (
            _divergence(old, old_weight, states, weight, bias) for states in (new, new * scale + shift)
        )
        if not after < before:
            return 1.0
        shift /= family.output_scale(config)
        scale_norm(module, scale, shift, family.rms_norm.adds_one_to_weight)
        return left

    def refit_norm(self, point: RefitNorm, wanted: Tensor, run: RunningBlock | None) -> Tensor | None:
        """Fit a norm; return its new output, None if nothing was observed."""
        module: Any = self.models[1].get_submodule(point.name)
        if module in self.done or not has_norm_at(self.models[1], point.name):
            return None
        self.done.add(module)
        family: Any = family_of(self.models[1])
        inputs = self._observe(1, [point], run)[point]
        return fit_norm(module, wanted[:, self.keep], inputs, family.rms_norm.adds_one_to_weight)

    def refit_layers(self, point: RefitLayers, inputs: LayerInputs) -> None:
        """Fit linear layers that read `inputs`."""
        for name in point.names:
            if self._can_be_fitted(name):
                old_weight = linear_with_inputs(self.models[0], name).weight.detach()
                self.left[name] = refit_narrow_layer(self.models[1], name, old_weight, inputs)
                self.done.add(self.models[1].get_submodule(name))

    def _can_be_fitted(self, name: str) -> bool:
        layer = linear_with_inputs(self.models[1], name)
        met = self.models[1].get_submodule(name) in self.done
        return not (met or is_masked(layer) or id(layer.weight) in self.tables)

    def _observe(
        self, number: int, points: Sequence[RefitPoint], run: RunningBlock | None, held_back: bool = False
    ) -> dict[RefitPoint, Tensor]:
        """Return the layer inputs and norm outputs of one model at `points`, float32 [T, width].

        On the calibration samples, or those that are held back; empty if there are none.
        """
        samples = self.rows.held_back if held_back else self.rows
        if samples is None:
            return {}
        model, inputs = self.models[number], {str(index): list[Tensor]() for index in range(len(points))}
        modules = [_find_module(model, point) for point in points]

        def see(key: str, x: Tensor) -> None:
            inputs[key].append(x[:: self.stride].float().cpu())

        layers = {str(index): [module] for index, module in enumerate(modules)}
        if run is not None:
            run.observe(layers, see, held_back=held_back)
        else:
            observe_inputs(model, samples, layers, see, self.ctx)
        observed: dict[RefitPoint, Tensor] = {}
        for index, point in enumerate(points):
            x = torch.cat(inputs[str(index)])
            # norms treat each token independently, so their outputs are computed after the run
            observed[point] = _apply_norm(modules[index], x) if isinstance(point, RefitNorm) else x
        return observed


def _last_norm(model: Any) -> str | None:
    """Return the norm of the last block whose outputs are the last hidden states, None if there is none."""
    block = blocks_of(model)[-1]
    stream = block.stack.stream
    name = None if stream.pre_norm else f"{block.module_path}.{stream.part_norms[-1]}"
    return name if name and has_norm_at(model, name) else None


def _logits_bias(model: Any, head: str) -> Tensor:
    """Return what a model adds to the products of its output layer `head`, float64 [1] or [N]."""
    bias = torch.zeros(1, dtype=torch.float64)
    for term in (getattr(model.get_submodule(head), "bias", None), getattr(model, "final_logits_bias", None)):
        if term is not None:  # the latter is a buffer [1, N] of BART and Marian
            bias = bias + term.detach().double().cpu().flatten()
    return bias


def _divergence(old: Tensor, old_weight: Tensor, new: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Return the sum over tokens of the Kullback-Leibler divergence of output probabilities.

    Args:
        old: inputs of the original output layer, float64 [T, D].
        old_weight: its weight, [N, D].
        new: inputs of the narrow output layer, float64 [T, k].
        weight: its weight, [N, k].
        bias: of the logits of both, float64 [1] or [N].
    """
    old_weight, weight = old_weight.double().cpu().t(), weight.double().cpu().t()
    total = 0.0
    for states, narrow_states in zip(old.split(_JUDGED_AT_ONCE), new.split(_JUDGED_AT_ONCE), strict=True):
        target, logits = states @ old_weight + bias, narrow_states @ weight + bias
        log_p, log_q = target.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        total += float(kl_div(log_q, log_p, reduction="sum", log_target=True))
    return total


def _find_module(model: Any, point: RefitPoint) -> nn.Module:
    if isinstance(point, RefitLayers):
        return linear_with_inputs(model, point.names[0])
    module: nn.Module = model.get_submodule(point.name)
    return module


@torch.no_grad()
def _apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    normalized: Tensor = norm(x.to(next(norm.parameters()).device))
    return normalized.float().cpu()


def _refit_points(block: Block) -> list[RefitPoint]:
    """Return the norms and linear layers to fit in a block, in the order of computation."""
    stack, points = block.stack, list[RefitPoint]()
    if block.index == 0 and stack.stream.embedding_norm and not stack.stream.embedding_projection:
        points.append(RefitNorm(stack.stream.embedding_norm))
    parts: list[Attention | FeedForward] = [*stack.attentions, stack.feed_forward]
    for index, kind in enumerate(parts):
        part = kind.with_prefix(block.module_path)
        if part in block.parts:
            if isinstance(part, Attention) and part.cross:
                points += [
                    RefitLayers((part.query,)),
                    RefitLayers((part.key, part.value), reads_encoder=True),
                ]
            else:
                points.append(RefitLayers(part.linear_layers[:-1]))
        if not stack.stream.pre_norm:
            points.append(RefitNorm(f"{block.module_path}.{stack.stream.part_norms[index]}"))
        elif stack.stream.output_norms and part in block.parts:
            points.append(RefitNorm(f"{block.module_path}.{stack.stream.output_norms[index]}"))
    return points


@torch.no_grad()
def fit_norm(module: Any, target: Tensor, actual: Tensor, adds_one_to_weight: bool = False) -> Tensor:
    """Fit scale and shift (if it has a bias) of each channel of a norm to map `actual` to `target`.

    Args:
        module: changed in place.
        target: the wanted outputs, float32 [T, k].
        actual: the present outputs of the same tokens.
        adds_one_to_weight: whether the norm multiplies by 1 + weight.

    Returns:
        The new outputs, float32 [T, k].
    """
    bias = getattr(module, "bias", None)
    x, y = actual.double(), target.double()
    zero = torch.zeros_like(x[0])
    mean_x, mean_y = (x.mean(dim=0), y.mean(dim=0)) if bias is not None else (zero, zero)
    x, y = x - mean_x, y - mean_y
    spread = x.square().mean(dim=0)
    ridge = RECONSTRUCTION_DAMPING * spread.mean()
    scale = ((x * y).mean(dim=0) + ridge) / (spread + ridge) if float(ridge) > 0 else torch.ones_like(spread)
    scale_norm(module, scale, mean_y - mean_x * scale, adds_one_to_weight)
    return (x * scale + mean_y).float()


@torch.no_grad()
def scale_norm(module: Any, scale: Tensor, shift: Tensor, adds_one_to_weight: bool) -> None:
    """Multiply the outputs of a norm by `scale`; if it has a bias, add `shift`. Both float64 [k]."""
    offset = 1.0 if adds_one_to_weight else 0.0
    module.weight.copy_((module.weight.double().cpu() + offset) * scale - offset)
    if getattr(module, "bias", None) is not None:
        module.bias.copy_(module.bias.double().cpu() * scale + shift)


@torch.no_grad()
def fit_logits(
    old_weight: Tensor, weight: Tensor, inputs: LayerInputs, has_bias: bool
) -> tuple[Tensor, Tensor, float]:
    """Return the scale and shift of the inputs of a narrow output layer with the least error of its logits.

    Args:
        old_weight: W, float [N, D].
        weight: E, float [N, k], which does not change.
        inputs: of the original output layer, and the narrow one's.
        has_bias: whether the inputs can be shifted.

    Returns:
        The scale and the shift (zeros without a bias), float64 [k], and the squared error of the logits
        relative to that before, on the samples held back from calibration if there are any.
    """
    old_weight, weight = old_weight.double().cpu(), weight.double().cpu()
    gram, mixed = weight.t() @ weight, weight.t() @ old_weight
    x, y = inputs.old.double(), inputs.new.double()
    mean_x, mean_y = x.mean(dim=0) * has_bias, y.mean(dim=0) * has_bias
    x, y = x.sub_(mean_x), y.sub_(mean_y)
    matrix, target = gram * (y.t() @ y), (mixed * (y.t() @ x)).sum(dim=1)
    ridge = RECONSTRUCTION_DAMPING * float(matrix.diagonal().mean())
    if not ridge > 0:
        return torch.ones_like(mean_y), torch.zeros_like(mean_y), 1.0
    matrix.diagonal().add_(ridge)
    scale = torch.linalg.solve(matrix, target + ridge)
    damped = gram + RECONSTRUCTION_DAMPING * float(gram.diagonal().mean()) * torch.eye(len(gram))
    shift = torch.linalg.solve(damped, mixed @ mean_x - gram @ (scale * mean_y)) * has_bias
    old_gram = old_weight.t() @ old_weight

    def error_of(old: Tensor, new: Tensor) -> float:
        error = (old_gram * (old.t() @ old)).sum() - 2 * (mixed * (new.t() @ old)).sum()
        return float(error + (gram * (new.t() @ new)).sum())

    old, new = (each.double() for each in inputs.judged or (inputs.old, inputs.new))
    error_before = error_of(old, new)
    return scale, shift, error_of(old, new * scale + shift) / error_before if error_before > 0 else 1.0


@torch.no_grad()
def refit_narrow_layer(model: Any, name: str, old_weight: Tensor, inputs: LayerInputs) -> float:
    """Refit the weights of the layer `name` to its narrower inputs.

    Args:
        model: the narrow model; changed in place.
        name: a linear or factorized layer.
        old_weight: the weight before the cut, float [N, D]; of a factorized layer that of `down`.
        inputs: of the original layer, and the new ones.

    Returns:
        The squared output error relative to that of the plain cut, on the samples held back from calibration
        if there are any; 1 if that of the cut was 0.
    """
    layer, owner = linear_with_inputs(model, name), bias_owner(model.get_submodule(name))
    cut_weight, old_weight = layer.weight.detach().double().cpu(), old_weight.double().cpu()

    def error_of_cut(old_inputs: Tensor, new_inputs: Tensor) -> tuple[Tensor, Tensor]:
        x = new_inputs.double()
        return x, (old_inputs.double() @ old_weight.t()).sub_(x @ cut_weight.t())

    x, residual = error_of_cut(inputs.old, inputs.new)
    mean_x, mean_residual = x.mean(dim=0), residual.mean(dim=0)
    if owner.bias is None:
        mean_x, mean_residual = torch.zeros_like(mean_x), torch.zeros_like(mean_residual)
    x, residual = x.sub_(mean_x), residual.sub_(mean_residual)
    matrix = x.t() @ x
    matrix.diagonal().add_(RECONSTRUCTION_DAMPING * float(matrix.diagonal().mean()))
    if not float(matrix.diagonal().max()) > 0:
        return 1.0
    change = torch.linalg.solve(matrix, x.t() @ residual).t()
    layer.weight.copy_(cut_weight + change)
    if owner.bias is not None:
        shift = mean_residual - change @ mean_x
        if owner is not layer:
            shift = owner.weight.double().cpu() @ shift
        owner.bias.add_(shift.to(owner.bias))
    x, residual = error_of_cut(*(inputs.judged or (inputs.old, inputs.new)))
    error_before = float(residual.square().sum())
    error_after = float(residual.sub_(mean_residual).sub_((x - mean_x) @ change.t()).square().sum())
    return error_after / error_before if error_before > 0 else 1.0


def prune_width(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Prune the hidden width of `src`, and write the model to `ctx.out`.

    Raises:
        InputError: the model's width cannot be pruned, or calibration samples are missing.
    """
    if reason := fixed_width_error(read_json_object(src.path / "config.json"), ctx.task):
        raise InputError(f"prune: {reason.message}", code=reason.code, setting=reason.setting)
    model, edits = load_model(src.path)
    edits, codes = dequantize_model(model, edits, src, ctx, "prune", everywhere=True)
    parameters_before, width = count_stored_parameters(model), hidden_width(model)
    num_kept = count_kept_channels(width, settings)
    ctx.details["parameters_before"], ctx.details["width_before"] = parameters_before, width
    if num_kept < width:
        score = IMPORTANCES[settings.importance].scorer("width")
        scores: Tensor = score(ScoredModel(model, src, settings, ctx), width)
        channels = scores.topk(num_kept).indices.sort().values
        samples = load_reconstruction_samples(model, src, settings, ctx)
        original = copy.deepcopy(model) if samples is not None else None
        edit = prune_hidden_width(model, channels.tolist())
        if samples is not None:
            ctx.details["reconstruction_error"] = refit_width(original, model, channels, samples, ctx)
        if codes is not None:
            codes.record_kept_channels(channels.tolist())
        edits = write_width_to_config(model, edits, edit)
    else:
        ctx.warn(
            "nothing-to-remove",
            f"keep_ratio {settings.keep_ratio_of('width'):g} of {width} channels, rounded to a multiple of"
            f" {settings.multiple_of}, keeps all of them; nothing is removed. Lower keep_ratio or"
            " multiple_of.",
        )
    if 2 * width * settings.keep_ratio_of("width") <= num_kept < width:
        ctx.warn(
            "minimum-kept",
            f"keep_ratio {settings.keep_ratio_of('width'):g} of {width} channels is less than {num_kept},"
            f" the minimum; {num_kept} channels are kept.",
        )
    ctx.details["width_after"] = num_kept
    ctx.details["parameters_after"] = count_stored_parameters(model)
    save_requantized(model, edits, src, settings.dtype, ctx, codes)
