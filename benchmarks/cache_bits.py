"""ONNX Runtime's GroupQueryAttention with int8 caches: is it what numpy says, and what does it cost?

    python benchmarks/cache_bits.py --rounds 40

First one line for each case of the operator with int8 caches (scales per tensor or per channel, rotary or
not, a window or none, padding on the left): codes that differ from numpy's, and the largest difference of
the output from attention over the dequantized codes, worked out in numpy. Then processor time of one call
beside float32 caches, in turns, one thread: medians, and the ratio of each round's two times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

SCALE_GRANULARITIES = ("PER_TENSOR", "PER_CHANNEL")


def session(
    heads: int, keys: int, width: int, per: str | None, *, rotary: bool = False, window: int | None = None
) -> onnxruntime.InferenceSession:
    """Return a graph of one GroupQueryAttention; `per` None: caches are float32."""
    kind = TensorProto.INT8 if per else TensorProto.FLOAT
    inputs: dict[str, tuple[int, list[Any] | None]] = {
        "q": (TensorProto.FLOAT, None), "k": (TensorProto.FLOAT, None), "v": (TensorProto.FLOAT, None),
        "past_k": (kind, ["b", keys, "p", width]), "past_v": (kind, ["b", keys, "p", width]),
        "last": (TensorProto.INT32, ["b"]), "total": (TensorProto.INT32, []),
    }  # fmt: skip
    order = [*inputs, *(["cos", "sin"] if rotary else ["", ""]), "", "bias"]
    more: dict[str, Any] = {} if window is None else {"local_window_size": window}
    if per:
        order += ["", "k_scale", "v_scale"]
        more |= {"k_quant_type": per, "v_quant_type": per, "kv_cache_bit_width": 8}
    for name in order[len(inputs) :]:
        if name:
            inputs[name] = (TensorProto.FLOAT, None)
    node = helper.make_node(
        "GroupQueryAttention", order, ["out", "k_now", "v_now"], domain="com.microsoft",
        num_heads=heads, kv_num_heads=keys, do_rotary=int(rotary), **more,
    )  # fmt: skip
    outputs = {"out": TensorProto.FLOAT, "k_now": kind, "v_now": kind}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, *about) for name, about in inputs.items()],
        [helper.make_tensor_value_info(name, about, None) for name, about in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def feeds(
    rng: Any, shape: tuple[int, int, int], heads: tuple[int, int, int], per: str | None, padding: int = 0
) -> dict[str, Any]:
    """Return random inputs for shape (batch, past, fed); the last row begins with `padding` masked places."""
    batch, past, fed = shape
    queries, keys, width = heads
    fed_in = {
        name: rng.normal(size=(batch, fed, n * width)).astype(np.float32)
        for name, n in (("q", queries), ("k", keys), ("v", keys))
    }
    codes = rng.integers(-127, 128, size=(2, batch, keys, past, width))
    given = codes.astype(np.int8) if per else codes.astype(np.float32) * np.float32(0.02)
    bias = np.zeros((batch, 1, fed, past + fed), np.float32)
    bias[-1, :, :, :padding] = -1e4
    fed_in |= {"past_k": given[0], "past_v": given[1], "bias": bias}
    fed_in |= {"last": np.full(batch, past + fed - 1, np.int32), "total": np.array(past + fed, np.int32)}
    if per:
        size = (1,) if per == "PER_TENSOR" else (keys, 1, width)
        for name in ("k_scale", "v_scale"):
            fed_in[name] = rng.uniform(0.01, 0.03, size=size).astype(np.float32)
    return fed_in


def reference_attention(
    inputs: dict[str, Any], heads: tuple[int, int, int], window: int | None
) -> tuple[Any, Any, Any]:
    """Work out output and codes: symmetric, half to even, keys rotated before they are rounded."""
    queries, keys, width = heads
    q, k, v = (split(inputs[name], width) for name in "qkv")
    past, fed = inputs["past_k"].shape[2], q.shape[2]
    if "cos" in inputs:
        q, k = (rotate(x, inputs["cos"][past : past + fed], inputs["sin"][past : past + fed]) for x in (q, k))
    caches, floats = [], []
    for name, new in (("k", k), ("v", v)):
        scale = inputs[f"{name}_scale"]
        codes = np.clip(np.rint(new / scale), -128, 127).astype(np.int8)
        caches.append(np.concatenate([inputs[f"past_{name}"], codes], axis=2))
        floats.append(np.repeat(caches[-1] * scale, queries // keys, axis=1))
    behind = np.arange(past, past + fed)[:, None] - np.arange(past + fed)[None]
    hidden = (behind < 0) | (behind >= (window or past + fed))
    scores = q @ floats[0].swapaxes(2, 3) / np.sqrt(width) + inputs["bias"] + np.where(hidden, -1e30, 0.0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = (weights / weights.sum(axis=-1, keepdims=True)) @ floats[1]
    return out.swapaxes(1, 2).reshape(*inputs["q"].shape), *caches


def split(x: Any, width: int) -> Any:
    return x.reshape(*x.shape[:2], -1, width).swapaxes(1, 2)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def compare_with_numpy() -> Iterator[tuple[str, bool, int | None, tuple[int, int, int], int, float]]:
    """Yield each case, how many codes differ from numpy's, and the largest difference of the output."""
    heads, padding, rng = (8, 4, 16), 2, np.random.default_rng(0)
    shapes = ((2, 0, 6), (2, 6, 1), (1, 5, 3))
    for per, rotary, window, shape in product(SCALE_GRANULARITIES, (False, True), (None, 3), shapes):
        given = feeds(rng, shape, heads, per, padding if shape[0] > 1 else 0)
        if rotary:
            angles = np.arange(32)[:, None] / 10000 ** (np.arange(8) / 8)
            given |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        run = session(*heads, per, rotary=rotary, window=window)
        out, *caches = run.run(None, given)
        ought, *codes = reference_attention(given, heads, window)
        differ = sum(int((a != b).sum()) for a, b in zip(caches, codes, strict=True))
        # what a place of padding itself says is read by nobody
        compared = np.s_[:, max(0, padding - shape[1]) :] if shape[0] > 1 else np.s_[:]
        yield per, rotary, window, shape, differ, float(np.abs(out - ought)[compared].max())


def measure(rounds: int) -> None:
    rng = np.random.default_rng(0)
    print("| heads | past | fed | float32, ms | int8 per tensor | int8 per channel | cache, MB |")
    for heads, (past, fed) in product(((8, 8, 64), (32, 8, 64)), ((500, 1), (2000, 1), (0, 512), (0, 2000))):
        arms = {
            per: (session(*heads, per), feeds(rng, (1, past, fed), heads, per))
            for per in (None, *SCALE_GRANULARITIES)
        }
        times: dict[str | None, list[float]] = {per: [] for per in arms}
        repeats = 10 if fed == 1 else 1
        for _ in range(rounds if fed < 1000 else min(rounds, 5)):
            for per, (run, given) in arms.items():
                begun = time.process_time()
                for _ in range(repeats):
                    run.run(None, given)
                times[per].append((time.process_time() - begun) / repeats * 1e3)
        cells = [f"{np.median(times[None]):.2f}"]
        for per in SCALE_GRANULARITIES:
            ratios = np.array(times[per]) / np.array(times[None])
            low, high = np.percentile(ratios, [10, 90])
            cells.append(f"{np.median(times[per]):.2f}: {np.median(ratios):.2f} [{low:.2f}, {high:.2f}]")
        size = 2 * heads[1] * heads[2] * (past + fed) / 1e6
        cells.append(f"{4 * size:.2f} → {size:.2f}")
        print(f"| {heads[0]}, {heads[1]} of {heads[2]} | {past} | {fed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print("| scales | rotary | window | batch, past, fed | codes that differ | output differs by |")
    for *case, error in compare_with_numpy():
        print(f"| {' | '.join(map(str, case))} | {error:.1e} |", flush=True)
    measure(options.rounds)
