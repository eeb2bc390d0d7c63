"""What int8 weights lose on other grids than int8-dynamic's.

    python benchmarks/int8_grids.py MODEL DATA --rows 150

MODEL is the folder of a translator, DATA a file of its pairs. The weights of all linear layers and embeddings
are rounded, per channel or per tensor, symmetric or with zero points; then activations too, as the scheme
int8-dynamic does it, on both symmetric grids. Printed is the cross-entropy of the targets (nats a token,
teacher forcing), and how far it is from that of the floats, with a 95 % interval over rows.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GRIDS = ("channel", "channel, zero points", "tensor", "tensor, zero points")


def quantize_dequantize(weight: Tensor, grid: str) -> Tensor:
    """Return the values of 8-bit codes for `weight` [N, K]."""
    rows = weight.flatten()[None] if grid.startswith("tensor") else weight
    if "zero" in grid:
        low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=1e-12)
        zero = (-low / scale).round()
        return (((rows / scale).round() + zero).clamp(0, 255) - zero).mul(scale).view_as(weight)
    scale = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (rows / scale).round().mul(scale).view_as(weight)


def quantized_model(model: Any, grid: str) -> Any:
    """Return the model in scheme int8-dynamic, with a scale per `channel` or `tensor`."""
    from smelt.compress.quantize.plan_layers import quantize_model
    from smelt.compress.quantize.settings import QuantizeSettings

    quantize_model(model, QuantizeSettings.model_validate({"scheme": "int8-dynamic", "granularity": grid}))
    return model


@torch.no_grad()
def sample_losses(model: Any, batches: list[dict[str, Tensor]]) -> np.ndarray[Any, Any]:
    """Return for each row the summed loss of its target and its tokens, float64 [rows, 2]."""
    found = []
    for batch in batches:
        logits = model(**batch).logits[0].log_softmax(-1)
        target = batch["labels"][0]
        found.append((-float(logits.gather(1, target[:, None]).sum()), len(target)))
    return np.array(found)


def loss_difference(one: Any, other: Any) -> str:
    """Return the difference of two losses a token, with an interval over rows drawn again."""
    draw = np.random.default_rng(0)
    picks = draw.integers(0, len(one), (2000, len(one)))
    gap, tokens = one[:, 0] - other[:, 0], one[:, 1]
    low, high = np.percentile(gap[picks].sum(1) / tokens[picks].sum(1), (2.5, 97.5))
    return f"{gap.sum() / tokens.sum():+.4f} [{low:+.4f}, {high:+.4f}]"


def main() -> None:
    """Measure and print."""
    from smelt.data.examples import read_split
    from smelt.data.splits import Columns
    from smelt.models.checkpoint import load_model, load_tokenizer
    from smelt.quantization.layers import is_embedding_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--rows", type=int, default=150)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(asked.model)
    rows = read_split(asked.data, "translation", Columns(), Path.cwd()).examples[: asked.rows]
    batches = [
        dict(tokenizer([row.text], text_target=[row.references[0]], return_tensors="pt")) for row in rows
    ]
    model, _ = load_model(asked.model)
    whole = sample_losses(model, batches)
    print(f"float: {whole[:, 0].sum() / whole[:, 1].sum():.4f} nats a token, {len(rows)} rows")
    for grid in GRIDS:
        changed = copy.deepcopy(model)
        off = square = 0.0
        for parameter in {
            m.weight for m in changed.modules() if isinstance(m, nn.Linear) or is_embedding_table(m)
        }:
            new = quantize_dequantize(parameter.data, grid)
            off += float((new - parameter.data).square().sum())
            square += float(parameter.data.square().sum())
            parameter.data = new
        share = 100 * (off / square) ** 0.5
        found = loss_difference(sample_losses(changed, batches), whole)
        print(f"weights, {grid}: {share:.2f} % of the weights (rms), {found} from float")
    channel, tensor = (
        sample_losses(quantized_model(copy.deepcopy(model), grid), batches) for grid in ("channel", "tensor")
    )
    print(f"int8-dynamic: {loss_difference(channel, whole)} from float")
    beside = loss_difference(tensor, channel)
    print(
        f"int8-dynamic, per tensor: {loss_difference(tensor, whole)} from float, {beside} from int8-dynamic"
    )


if __name__ == "__main__":
    main()
