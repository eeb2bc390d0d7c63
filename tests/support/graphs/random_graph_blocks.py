"""The blocks of drawn graphs: each takes a value and its shape without the batch, and gives others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.support.graphs.random_graphs import GraphWriter, Shape

Ends = list[tuple[str, int, Sequence[Any] | None]]
Block = Callable[[GraphWriter, str, Shape], tuple[str, Shape]]
_FLOAT, _INT64, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
_WIDTHS = (8, 4, 16, 6, 1)


def write_blocks(w: GraphWriter, kind: str) -> Ends:
    """Write inputs, blocks of `kind` and outputs; return (name, type, shape) of the outputs."""
    value, shape = _INPUT_WRITERS[kind](w)
    values = [(value, shape)]
    for _ in range(w.one_of((1, 2, 3))):
        blocks = (
            _BLOCKS_BY_RANK[len(shape)] if values[1:] or kind not in _FIRST_BLOCKS else _FIRST_BLOCKS[kind]
        )
        value, shape = _write_block(w, w.one_of(blocks), value, shape)
        values.append((value, shape))
    if w.chance():
        value, shape = _write_block(w, w.one_of((dense, gemm)), *flat(w, value, shape))
        values.append((value, shape))
    outputs: Ends = [(_name_output(w, value), _FLOAT, [w.batch, *shape])]
    if w.chance(4):
        inner, sizes = w.one_of(values)
        outputs.append((_name_output(w, inner), _FLOAT, [w.batch, *sizes]))
    if w.chance(5):
        outputs.append(
            (w.node("ArgMax", [value], axis=len(shape), keepdims=0), _INT64, [w.batch, *shape[:-1]])
        )
    if w.chance(8):
        empty = w.input("float32", (0,), "nothing")
        outputs.append((w.node("Relu", [empty]), _FLOAT, [w.batch, 0]))
    if w.chance(10):
        outputs.append((w.constant(np.float32([1, 2])), _FLOAT, [2]))
        if w.nodes[-1].op_type != "Constant":
            outputs[-1] = (w.node("Identity", [outputs[-1][0]]), _FLOAT, [2])
    return outputs


def _write_block(w: GraphWriter, block: Block, value: str, shape: Shape) -> tuple[str, Shape]:
    w.blocks.append(block.__name__)
    return block(w, value, shape)


def _name_output(w: GraphWriter, value: str) -> str:
    """Return an output that is no input of the graph, and no other output."""
    return str(w.node("Identity", [value]))


def flat(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    if len(shape) == 1:
        return value, shape
    sizes = (int(np.prod(shape)),)
    if w.chance():
        return w.node("Flatten", [value], axis=1), sizes
    return w.node("Reshape", [value, w.ints(*w.one_of(((0, -1), (-1, sizes[0]))))]), sizes


# --- products


def dense(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """MatMul and maybe a bias; of more axes at times a matrix with a 1 before it."""
    width = w.one_of(_WIDTHS)
    sizes = (1, shape[-1], width) if len(shape) > 1 and w.chance(3) else (shape[-1], width)
    product = w.node("MatMul", [value, w.matrix(*sizes, fan_in=shape[-1])])
    if w.chance():
        order = [product, w.bias(*w.one_of(((width,), (1, width), (1,))))]
        product = w.node("Add", order[:: w.one_of((1, -1))])
    return product, (*shape[:-1], width)


def quantized(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """A product of QuantizeLinear and DequantizeLinear pairs, one scale per output at times."""
    if w.opset < 10:
        return dense(w, value, shape)
    width = w.one_of(_WIDTHS)
    grid = [w.constant(np.float32(0.05), "scale"), w.constant(np.uint8(128), "zero")]
    value = w.node("DequantizeLinear", [w.node("QuantizeLinear", [value, *grid]), *grid])
    codes = w.constant(w.random.integers(-127, 128, (shape[-1], width)).astype(np.int8), "codes")
    count = (width,) if w.opset >= 13 and w.chance() else ()
    scales = w.constant(np.full(count, 0.01, np.float32), "scale")
    zeros = w.constant(np.zeros(count, np.int8), "zero")
    weight = w.node("DequantizeLinear", [codes, scales, zeros], **({"axis": 1} if count else {}))
    return w.node("MatMul", [value, weight]), (*shape[:-1], width)


def gemm(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    value, shape = flat(w, value, shape)
    width, attributes = w.one_of(_WIDTHS), {}
    if w.chance(3):
        value, attributes["transA"] = w.node("Transpose", [value], perm=[1, 0]), 1
    turned = w.chance()
    sizes = (width, shape[0]) if turned else (shape[0], width)
    inputs = [value, w.matrix(*sizes, fan_in=shape[0])]
    if turned or w.chance(4):
        attributes["transB"] = int(turned)
    if w.opset < 11 or not w.chance(3):
        inputs.append(w.bias(*w.one_of(((width,), (1, width), (1,), ()))))
    for name in ("alpha", "beta"):
        if w.chance(3):
            attributes[name] = w.one_of((0.5, 2.0, 0.0, -1.0))
    return w.node("Gemm", inputs, **attributes), (width,)


def function(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """A product inside of a function of the model, which other nodes may call too."""
    if w.ir < 8:
        return dense(w, value, shape)
    width, name = w.one_of(_WIDTHS), w.one_of(("Dense", "Linear.1"))
    if name not in w.functions:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Add", ["h", "b"], ["s"]),
            helper.make_node(w.one_of(("Relu", "Tanh")), ["s"], ["y"]),
        ]
        imports = [helper.make_opsetid("", w.opset)]
        w.functions[name] = helper.make_function("local", name, ["x", "w", "b"], ["y"], nodes, imports)
    weights = [w.matrix(shape[-1], width), w.bias(width)]
    return w.node(name, [value, *weights], domain="local"), (*shape[:-1], width)


def residual(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    product = w.node("MatMul", [value, w.matrix(shape[-1], shape[-1])])
    return w.node("Add", [product, value]), shape


def nothing(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """An input without columns: joined to the value, or the left side of a product of nothing."""
    value, shape = flat(w, value, shape)
    empty = w.input("float32", (0,), "nothing")
    if w.chance():
        return w.node("Concat", [value, empty], axis=1), shape
    return w.node("Add", [value, w.node("MatMul", [empty, w.matrix(0, shape[0])])]), shape


# --- what is no product


def activation(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    plain = ["Relu", "Tanh", "Sigmoid", "LeakyRelu", "Elu", "Softplus", "HardSigmoid", "Erf", "Abs", "Neg"]
    plain += [*(["HardSwish"] if w.opset >= 14 else []), *(["Gelu"] if w.opset >= 20 else [])]
    name = w.one_of([*plain, "Clip", "PRelu", "Softmax", "Mul", "Double"])
    if name == "Clip":
        if w.opset < 11:
            return w.node("Clip", [value], min=-1.0, max=1.0), shape
        bounds = [w.constant(np.float32(-1)), w.constant(np.float32(1))]
        return w.node("Clip", [value, *w.one_of((bounds, ["", bounds[1]], bounds[:1]))]), shape
    if name == "PRelu":
        return w.node("PRelu", [value, w.bias(*w.one_of(((1,), (shape[-1],))))]), shape
    if name == "Softmax":
        return w.node("Softmax", [value], axis=len(shape)), shape
    if name == "Mul":
        return w.node("Mul", [value, w.bias(*w.one_of(((1,), (), (shape[-1],))))]), shape
    if name == "Double":
        wide = w.node("Cast", [value], to=TensorProto.DOUBLE)
        wide = w.node("Mul", [wide, w.constant(np.float64(0.5))])
        return w.node("Cast", [wide], to=_FLOAT), shape
    return w.node(name, [value]), shape


def norm(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """LayerNormalization, as one operator or spelled out."""
    width, axis = shape[-1], len(shape)
    scale, shift = w.constant(np.ones(width, np.float32)), w.bias(width)
    if w.opset >= 17 and w.chance():
        return w.node("LayerNormalization", [value, scale, shift], axis=-1), shape
    mean = w.axes("ReduceMean", value, [axis], 18, keepdims=1)
    off = w.node("Sub", [value, mean])
    square = w.node("Pow", [off, w.constant(np.float32(2))]) if w.chance() else w.node("Mul", [off, off])
    spread = w.axes("ReduceMean", square, [axis], 18, keepdims=1)
    spread = w.node("Sqrt", [w.node("Add", [spread, w.constant(np.float32(1e-5))])])
    normalized = w.node("Mul", [w.node("Div", [off, spread]), scale])
    return w.node("Add", [normalized, shift]), shape


def parts(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """Split in two and joined the other way round."""
    half, axis = shape[-1] // 2, len(shape)
    if not half or shape[-1] % 2:
        return activation(w, value, shape)
    if w.opset < 13:
        halves = w.node("Split", [value], 2, axis=axis, split=[half, half])
    elif w.opset < 18 or w.chance():
        halves = w.node("Split", [value, w.ints(half, half)], 2, axis=axis)
    else:
        halves = w.node("Split", [value], 2, axis=axis, num_outputs=2)
    return w.node("Concat", halves[::-1], axis=axis), shape


# --- graphs inside of nodes


def branches(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """If, of an input or of what a shape says; weights lie inside or outside."""
    width = w.one_of(_WIDTHS)
    if w.chance():
        condition = w.input("bool", None, "flag")
    else:
        rows = w.node("Gather", [w.node("Shape", [value]), w.constant(np.int64(1))], axis=0)
        condition = w.node("Less", [rows, w.constant(np.int64(3))])
    outside = w.matrix(shape[-1], width)

    def branch() -> Any:
        inner = w.body()
        matrix = outside if w.chance() else inner.matrix(shape[-1], width)
        value_name = inner.node("MatMul", [value, matrix])
        if w.chance():
            value_name = inner.node("Add", [value_name, inner.bias(width)])
        return _graph(inner, [], [(value_name, _FLOAT, [w.batch, *shape[:-1], width])])

    value_name = w.node("If", [condition], then_branch=branch(), else_branch=branch())
    return value_name, (*shape[:-1], width)


def loop(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """A few times the same product; all of its states are an output at times."""
    inner, width = w.body(), shape[-1]
    step, go, state = (inner.name(name) for name in ("i", "go", "state"))
    outside = w.matrix(width, width)
    product = inner.node("MatMul", [state, outside if w.chance() else inner.matrix(width, width)])
    product = inner.node("Tanh", [product])
    still = inner.node("Identity", [go])
    sizes = [w.batch, *shape]
    has_scan_output = w.chance(3)
    body_outputs = [(still, _BOOL, []), (product, _FLOAT, sizes)]
    if has_scan_output:
        body_outputs.append((inner.node("Identity", [product]), _FLOAT, sizes))
    body = _graph(inner, [(step, _INT64, []), (go, _BOOL, []), (state, _FLOAT, sizes)], body_outputs)
    trips = w.input("int64", None, "trips", max_value=4) if w.chance(3) else w.constant(np.int64(2))
    results = w.node(
        "Loop", [trips, w.constant(np.bool_(True)), value], 2 if has_scan_output else 1, body=body
    )
    if not has_scan_output:
        return results, shape
    return w.node("Add", [results[0], w.axes("ReduceSum", results[1], [0], 13, keepdims=0)]), shape


def scan(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """A recurrence over the steps of a sequence, or over the columns of a row."""
    if len(shape) == 1:
        value, shape = w.axes("Unsqueeze", value, [2], 13), (shape[0], 1)
    steps, width = shape
    hidden = w.one_of((4, 8))
    inner = w.body()
    state, item = inner.name("state"), inner.name("item")
    product = inner.node(
        "MatMul", [item, w.matrix(width, hidden) if w.chance() else inner.matrix(width, hidden)]
    )
    product = inner.node("Add", [product, inner.node("MatMul", [state, inner.matrix(hidden, hidden)])])
    product = inner.node("Tanh", [product])
    sizes = [w.batch, hidden]
    body = _graph(
        inner, [(state, _FLOAT, sizes), (item, _FLOAT, [w.batch, width])],
        [(product, _FLOAT, sizes), (inner.node("Identity", [product]), _FLOAT, sizes)],
    )  # fmt: skip
    start = w.node("MatMul", [w.axes("ReduceMean", value, [1], 18, keepdims=0), w.matrix(width, hidden)])
    turned = w.node("Transpose", [value], perm=[1, 0, 2])
    last, scan_output = w.node("Scan", [start, turned], 2, body=body, num_scan_inputs=1)
    if w.chance():
        return last, (hidden,)
    return w.node("Transpose", [scan_output], perm=[1, 0, 2]), (steps, hidden)


def _graph(inner: GraphWriter, inputs: Ends, outputs: Ends) -> Any:
    info = helper.make_tensor_value_info
    infos = [[info(*value) for value in values] for values in (inputs, outputs)]
    return helper.make_graph(inner.nodes, "body", *infos, inner.weights)


# --- sequences


def attention(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """Attention with a mask that is an input, a constant, or none, of one or two heads."""
    steps, width = shape
    heads = 2 if width % 2 == 0 and w.chance() else 1
    size = width // heads
    three = [_projected(w, value, width) for _ in range(3)]
    mask = w.one_of(("input", "causal", "none"))
    if mask == "input":
        mask = _mask(w, steps)
    elif mask == "causal":
        mask = w.constant(
            np.triu(np.full((1, 1, steps, steps), w.one_of((-1e9, -1e4, -np.inf)), np.float32), 1)
        )
    if w.opset >= 23 and w.chance():
        inputs = [*three, *([] if mask == "none" else [mask])]
        attended = w.node("Attention", inputs, q_num_heads=heads, kv_num_heads=heads)
    else:
        split = w.one_of(((0, steps, heads, size), (0, 0, heads, size)))
        queries, keys, values = (w.node("Reshape", [projected, w.ints(*split)]) for projected in three)
        queries, values = (
            w.node("Transpose", [projected], perm=[0, 2, 1, 3]) for projected in (queries, values)
        )
        keys = w.node("Transpose", [keys], perm=[0, 2, 3, 1])
        scores = w.node("MatMul", [queries, keys])
        scores = w.node("Div", [scores, w.constant(np.float32(np.sqrt(size)))])
        if mask != "none":
            scores = w.node("Add", [scores, mask])
        attended = w.node("MatMul", [w.node("Softmax", [scores], axis=3), values])
        attended = w.node("Transpose", [attended], perm=[0, 2, 1, 3])
        attended = w.node("Reshape", [attended, w.ints(0, steps, width)])
    attended = _projected(w, attended, width)
    return (w.node("Add", [value, attended]) if w.chance() else attended), shape


def _projected(w: GraphWriter, value: str, width: int) -> str:
    sizes = (1, width, width) if w.chance(5) else (width, width)
    product = w.node("MatMul", [value, w.matrix(*sizes, fan_in=width)])
    return w.node("Add", [product, w.bias(width)]) if w.chance() else product


def _mask(w: GraphWriter, steps: int) -> str:
    """Return what is added to the scores: [batch, 1, 1, steps]."""
    dtype = w.one_of(("int64", "int32", "float32"))
    masks = [
        graph_input.name
        for graph_input in w.inputs
        if graph_input.values == "mask" and graph_input.dtype == dtype
    ]
    mask_options = {} if dtype == "float32" else {"max_value": 2}
    mask = masks[0] if masks else w.input(dtype, (steps,), "mask", values="mask", **mask_options)
    mask = w.axes("Unsqueeze", w.axes("Unsqueeze", mask, [1], 13), [2], 13)
    if dtype != "float32":
        mask = w.node("Cast", [mask], to=_FLOAT)
    mask = w.node("Sub", [w.constant(np.float32(1)), mask])
    return w.node("Mul", [mask, w.constant(np.float32(w.one_of((-1e4, -1e9, np.finfo(np.float32).min))))])


def recurrent(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """RNN, GRU or LSTM, whose state is an input, a constant or absent."""
    steps, width = shape
    operator, hidden = w.one_of(("LSTM", "GRU", "RNN")), w.one_of((4, 8))
    direction = w.one_of(("forward", "reverse", "bidirectional"))
    ways, gates = 2 if direction == "bidirectional" else 1, {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    rows = gates * hidden
    inputs = [
        w.node("Transpose", [value], perm=[1, 0, 2]),
        w.matrix(ways, rows, width, fan_in=width), w.matrix(ways, rows, hidden, fan_in=hidden),
        w.bias(ways, 2 * rows) if w.chance() else "", "",
    ]  # fmt: skip
    if w.chance():
        states = 2 if operator == "LSTM" else 1
        if w.batch in (1, 2) and w.chance():
            inputs += [w.constant(np.full((ways, w.batch, hidden), 0.1, np.float32)) for _ in range(states)]
        else:
            initial_states = [
                w.input("float32", (ways, hidden), "state", values="normal") for _ in range(states)
            ]
            inputs += [w.node("Transpose", [state], perm=[1, 0, 2]) for state in initial_states]
    while not inputs[-1]:
        inputs.pop()
    attributes: dict[str, Any] = {"linear_before_reset": 1} if operator == "GRU" and w.chance() else {}
    sequence, last = w.node(operator, inputs, 2, hidden_size=hidden, direction=direction, **attributes)
    if w.chance():
        last = w.node("Transpose", [last], perm=[1, 0, 2])
        return w.node("Reshape", [last, w.ints(-1, ways * hidden)]), (ways * hidden,)
    sequence = w.node("Transpose", [sequence], perm=[2, 0, 1, 3])
    return w.node("Reshape", [sequence, w.ints(0, steps, ways * hidden)]), (steps, ways * hidden)


def mean(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    return w.axes("ReduceMean", value, [1], 18, keepdims=0), shape[1:]


def last(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    return w.node("Gather", [value, w.constant(np.int64(shape[0] - 1))], axis=1), shape[1:]


# --- images


def conv(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """Conv or ConvTranspose, grouped at times, with all ways to say a padding."""
    channels, height, width = shape
    group = channels if w.chance(4) else 1
    out = channels * w.one_of((1, 2)) if group > 1 else w.one_of((4, 8, 3, 1))
    size = w.one_of((3, 1))
    inputs, stride = [value], w.one_of((1, 2))
    turned = w.chance(6)
    sizes = (channels, out // group, size, size) if turned else (out, channels // group, size, size)
    inputs.append(w.matrix(*sizes, fan_in=channels // group * size * size))
    if w.chance():
        inputs.append(w.bias(out))
    attributes: dict[str, Any] = {"strides": [stride, stride], "group": group}
    if w.chance(3):
        attributes["kernel_shape"] = [size, size]
    if turned:
        attributes["strides"] = [1, 1]
        convolved = w.node("ConvTranspose", inputs, **attributes)
        return convolved, (out, height + size - 1, width + size - 1)
    pad = size // 2
    if w.chance(3):
        attributes["auto_pad"] = w.one_of(("SAME_UPPER", "SAME_LOWER"))
    else:
        attributes["pads"] = [pad] * 4
    return w.node("Conv", inputs, **attributes), (out, -(-height // stride), -(-width // stride))


def batch_norm(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    channels = shape[0]
    spread = w.constant(np.abs(w.random.normal(size=channels)).astype(np.float32) + 0.1)
    inputs = [value, w.bias(channels), w.bias(channels), w.bias(channels), spread]
    return w.node("BatchNormalization", inputs), shape


def pool(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    channels, height, width = shape
    if min(height, width) < 2:
        return w.node("GlobalAveragePool", [value]), (channels, 1, 1)
    pooled = w.node(w.one_of(("MaxPool", "AveragePool")), [value], kernel_shape=[2, 2], strides=[2, 2])
    return pooled, (channels, height // 2, width // 2)


def skip(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    """Two convolutions of one weight, and what went in."""
    matrix = w.matrix(shape[0], shape[0], 3, 3, fan_in=9 * shape[0])
    current = value
    for _ in range(2):
        bias = [w.bias(shape[0])] if w.chance() else []
        current = w.node("Relu", [w.node("Conv", [current, matrix, *bias], pads=[1, 1, 1, 1])])
    return w.node("Add", [current, value]), shape


def squeeze(w: GraphWriter, value: str, shape: Shape) -> tuple[str, Shape]:
    return w.node("GlobalAveragePool", [value]), (shape[0], 1, 1)


# --- where graphs begin


def _row(w: GraphWriter) -> tuple[str, Shape]:
    width = w.one_of(_WIDTHS)
    return w.input("float32", (width,)), (width,)


def _image(w: GraphWriter) -> tuple[str, Shape]:
    shape = (w.one_of((3, 1, 4)), w.one_of((6, 5)), 6)
    return w.input("float32", shape), shape


def _sequence(w: GraphWriter) -> tuple[str, Shape]:
    """Numbers, or ids and a table, which the output layer reads too at times."""
    shape = w.one_of((4, 3, 1)), w.one_of((8, 4))
    if not w.chance():
        return w.input("float32", shape), shape
    ids = w.input(w.one_of(("int64", "int32")), shape[:1], "ids", max_value=10)
    return w.node("Gather", [w.matrix(10, shape[1], fan_in=1), ids], axis=0), shape


_INPUT_WRITERS = {
    "mlp": _row, "cnn": _image, "attention": _sequence, "recurrent": _sequence, "control": _row,
    "quantized": _row,
}  # fmt: skip
_FIRST_BLOCKS: dict[str, list[Block]] = {
    "cnn": [conv, skip], "attention": [attention], "recurrent": [recurrent],
    "control": [branches, loop, scan], "quantized": [quantized],
}  # fmt: skip
_BLOCKS_BY_RANK: dict[int, list[Block]] = {
    1: [dense, gemm, activation, norm, residual, function, parts, nothing, branches, loop],
    2: [dense, attention, recurrent, norm, activation, mean, last, residual, function, gemm, scan, loop],
    3: [conv, skip, batch_norm, pool, activation, squeeze, gemm],
}
