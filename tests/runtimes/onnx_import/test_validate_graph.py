"""Files of others: what is wrong with them is our error, in little memory and time."""

import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from onnx import AttributeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from smelt.runtimes.onnx_import.validate_graph import subprocess_main, validate_graph
from tests.support.graphs import imported_graphs as graphs


def problems(path: Path) -> dict[str, str]:
    """Return the texts of the problems of a file by their codes, validated in this process."""
    return {problem["code"]: problem["message"] for problem in subprocess_main([str(path)])["problems"]}


def test_valid_file_reports_inputs_outputs_and_type(tmp_path: Path) -> None:
    result = validate_graph(graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx"))
    assert result.problems == ()
    assert result.signature is not None
    assert [v.describe() for v in result.signature.inputs] == ["x float32 [N, 8]"]
    assert [v.describe() for v in result.signature.outputs] == ["logits float32 [N, 4]"]
    assert result.details == {
        "opset": 17,
        "nodes": 6,
        "parameters": 8 * 16 + 16 + 16 * 4 + 4,
        "producer": "",
        "operators": {"MatMul": 2, "Add": 2, "Relu": 1, "Identity": 1},
        "inner_operators": {},
        "weights": {"MatMul": 8 * 16 + 16 * 4, "Add": 16 + 4},
        "inner_weights": {},
        "random": [],
        "codes": 0,
        "float_matrices": ANY,
        "floats": "float32",
        "class_outputs": {"logits": -1},
    }


def test_weights_computed_from_constants_in_a_body_are_counted_once(tmp_path: Path) -> None:
    """Exporters write the gates of an LSTM as slices of one weight in another order."""
    values = {"w": np.ones((8, 6), np.float32), "0": np.array([0]), "4": np.array([4]), "8": np.array([8])}
    inside = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
        for name, value in values.items()
    ]
    inside += [
        helper.make_node("Slice", ["w", "4", "8", "0"], ["second"]),
        helper.make_node("Slice", ["w", "0", "4", "0", ""], ["first"]),
        helper.make_node("Concat", ["second", "first"], ["both"], axis=0),
        helper.make_node("MatMul", ["x", "both"], ["product"]),
        helper.make_node("Add", ["product", "product"], ["y"]),
    ]
    branch = helper.make_graph(inside, "branch", [], [graphs.value_info("y", None)])
    choice = helper.make_node("If", ["yes"], ["out"], "if", then_branch=branch, else_branch=branch)
    last = helper.make_node("MatMul", ["out", "out"], ["z"])  # depends on `x`, though `yes` is constant
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("z", None)]
    yes = numpy_helper.from_array(np.bool_(True), "yes")
    details = validate_graph(
        graphs.save_model(graphs.make_model([choice, last], *ends, [yes]), tmp_path / "m.onnx")
    ).details
    assert details is not None
    assert details["weights"] == {"If": 1}
    assert details["inner_weights"]["MatMul"] == 8 * 6 + 3
    assert "Add" not in details["inner_weights"]


def test_external_weights_are_listed(tmp_path: Path) -> None:
    path = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx", "weights.bin")
    assert subprocess_main([str(path)])["files"] == ["weights.bin"]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    model_bytes = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(model_bytes[: int(share * len(model_bytes))])
    messages = problems(tmp_path / "m.onnx")
    assert list(messages) == ["damaged-file"]
    assert f"({int(share * len(model_bytes)):,} bytes)" in messages["damaged-file"]


@pytest.mark.parametrize(("content", "code"), [
    (b"", "empty-file"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs-pointer"),
    (b"\x89PNG\r\n\x1a\n" + bytes(200), "damaged-file"), (b"\x08\x09", "no-graph"),
])  # fmt: skip
def test_invalid_model_is_reported(tmp_path: Path, content: bytes, code: str) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert list(problems(tmp_path / "m.onnx")) == [code]


@pytest.mark.parametrize(("location", "code", "shown"), [
    ("weights.bin", "external-data-missing", "weights.bin"),
    ("../weights.bin", "external-data-outside-folder", "'../weights.bin'"),
    ("/etc/hostname", "external-data-outside-folder", "'/etc/hostname'"),
    ("C:\\weights.bin", "external-data-outside-folder", r"'C:\\weights.bin'"),
    ("a\0b", "external-data-outside-folder", r"'a\x00b'"), ("", "external-data-outside-folder", "''"),
    (".", "external-data-outside-folder", "'.'"),
    ("link.bin", "external-data-link-outside-folder", "link.bin"),
    ("folder", "external-data-not-a-file", " folder"),
])  # fmt: skip
def test_weights_outside_of_the_folder_are_never_read(
    tmp_path: Path, location: str, code: str, shown: str
) -> None:
    inside = tmp_path / "inside"
    (inside / "folder").mkdir(parents=True)
    (tmp_path / "weights.bin").write_bytes(bytes(32))
    (inside / "link.bin").symlink_to(tmp_path / "weights.bin")
    messages = problems(graphs.save_model(graphs.model_with_external_data(location), inside / "m.onnx"))
    assert list(messages) == [code]
    assert "'w'" in messages[code]
    assert shown in messages[code]


def test_links_of_a_cache_to_the_folder_of_the_graph_are_followed(tmp_path: Path) -> None:
    """As huggingface_hub keeps files: names are links into a folder of contents."""
    contents, names = tmp_path / "blobs", tmp_path / "snapshots"
    names.mkdir()
    graphs.save_model(graphs.model_with_external_data("weights.bin"), contents / "1")
    (contents / "2").write_bytes(bytes(32))
    (names / "m.onnx").symlink_to(contents / "1")
    (names / "weights.bin").symlink_to(contents / "2")
    assert problems(names / "m.onnx") == {}


@pytest.mark.parametrize(("location", "code", "values"), [
    ({"offset": "8"}, "external-data-truncated", ["weights.bin", "32 bytes", "40"]),
    ({"offset": "-8"}, "external-data-not-a-number", ["offset", "weights.bin", "'-8'"]),
    ({"length": "9" * 30}, "external-data-not-a-number", ["length", "weights.bin", f"'{'9' * 30}'"]),
    ({"length": "64"}, "external-data-wrong-length", ["32 bytes", "64", "weights.bin"]),
])  # fmt: skip
def test_missing_range_of_a_file_is_reported(
    tmp_path: Path, location: dict[str, str], code: str, values: list[str]
) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(32))
    model = graphs.model_with_external_data("weights.bin", **location)
    messages = problems(graphs.save_model(model, tmp_path / "m.onnx"))
    assert list(messages) == [code]
    assert [value for value in values if value not in messages[code]] == []


def outside(location: str, kind: int = TensorProto.FLOAT) -> Any:
    """A tensor of 4 values that is said to lie in a file."""
    tensor = TensorProto(name="v", data_type=kind, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def sparse_constant(location: str) -> Any:
    """A model with a constant of 8 numbers, 4 of which are said to lie in a file."""
    indices = numpy_helper.from_array(np.arange(4), "places")
    sparse = SparseTensorProto(values=outside(location), indices=indices, dims=[8])
    nodes = [
        helper.make_node("Constant", [], ["c"], "sparse", sparse_value=sparse),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    return graphs.make_model(nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])])


def constant_of_a_function(location: str) -> Any:
    """A model whose function takes a tensor, which is said to lie in a file, where no call gives one."""
    constant = helper.make_node("Constant", [], ["k"])
    constant.attribute.add(name="value", type=AttributeProto.TENSOR, ref_attr_name="v")
    nodes = [constant, helper.make_node("Add", ["a", "k"], ["b"])]
    opset = helper.make_opsetid("", 17)
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, [opset])
    function.attribute_proto.append(helper.make_attribute("v", outside(location)))
    model = graphs.make_model(
        [helper.make_node("F", ["x"], ["y"], domain="own")],
        [graphs.value_info("x", ["N", 4])], [graphs.value_info("y", ["N", 4])], functions=[function],
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


@pytest.mark.parametrize("make", [sparse_constant, constant_of_a_function])
def test_tensors_in_every_part_of_a_file_are_checked(tmp_path: Path, make: Callable[[str], Any]) -> None:
    messages = problems(graphs.save_model(make("../near.bin"), tmp_path / "m.onnx"))
    assert list(messages) == ["external-data-outside-folder"]
    assert "'v'" in messages["external-data-outside-folder"]
    assert "'../near.bin'" in messages["external-data-outside-folder"]
    (tmp_path / "near.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    assert subprocess_main([str(graphs.save_model(make("near.bin"), tmp_path / "m.onnx"))])["files"] == [
        "near.bin"
    ]


def nested(depth: int) -> Any:
    last = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"])], "g", [], [graphs.value_info("r", ["N", 8])]
    )
    body = last
    for _ in range(depth):
        node = helper.make_node("If", ["yes"], ["r"], then_branch=body, else_branch=last)
        body = helper.make_graph([node], "g", [], [graphs.value_info("r", ["N", 8])])
    flag = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    model = graphs.make_model(
        [], [graphs.value_info("x", ["N", 8])], [graphs.value_info("r", ["N", 8])], [flag]
    )
    model.graph.node.extend(body.node)
    return model


def recursive() -> Any:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    calls = helper.make_node("F", ["a"], ["b"], domain="own")
    function = helper.make_function("own", "F", ["a"], ["b"], [calls], imports)
    node = helper.make_node("F", ["x"], ["y"], domain="own")
    graph = helper.make_graph([node], "g", [graphs.value_info("x", ["N"])], [graphs.value_info("y", ["N"])])
    return helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=9)


def calling(count: int, calls: int = 2) -> Any:
    """Functions each of which calls the next one several times: calls ** (count - 1) nodes."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = []
    for number in range(count):
        names = ["a", *(f"t{index}" for index in range(calls - 1)), "b"]
        nodes = [helper.make_node(f"F{number + 1}", [a], [b], domain="own") for a, b in pairwise(names)]
        if number == count - 1:
            nodes = [helper.make_node("Relu", ["a"], ["b"])]
        functions.append(helper.make_function("own", f"F{number}", ["a"], ["b"], nodes, imports))
    node = helper.make_node("F0", ["x"], ["y"], domain="own")
    signature = [graphs.value_info("x", ["N"])], [graphs.value_info("y", ["N"])]
    return helper.make_model(
        helper.make_graph([node], "g", *signature), functions=functions, opset_imports=imports, ir_version=9
    )


def looping(trips: int | None, stops: bool = False) -> Any:
    """A loop; with `stops` its body computes whether there is a next trip."""
    test = helper.make_node("Not" if stops else "Identity", ["c"], ["next"])
    nodes = [test, helper.make_node("Add", ["v", "v"], ["w"])]
    scalar = [graphs.value_info("i", [], TensorProto.INT64), graphs.value_info("c", [], TensorProto.BOOL)]
    flag = graphs.value_info("next", [], TensorProto.BOOL)
    row = ["N", 8]
    body = helper.make_graph(
        nodes, "body", [*scalar, graphs.value_info("v", row)], [flag, graphs.value_info("w", row)]
    )
    loop = helper.make_node("Loop", ["trips" if trips else "", "yes", "x"], ["y"], "long", body=body)
    constants = [
        numpy_helper.from_array(np.array(trips or 0), "trips"),
        helper.make_tensor("yes", 9, [], [True]),
    ]
    return graphs.make_model([loop], [graphs.value_info("x", row)], [graphs.value_info("y", row)], constants)


@pytest.mark.parametrize(("make", "code", "values"), [
    (lambda: calling(30), "too-many-nodes", ["5.37e+08", "1,000,000"]),
    (lambda: looping(10**18), "too-many-trips", ["Loop 'long'", "1e+18"]),
    (lambda: looping(None), "unlimited-trips", ["Loop 'long'"]),
])  # fmt: skip
def test_endless_loop_is_reported_before_opening(
    tmp_path: Path, make: Callable[[], Any], code: str, values: list[str]
) -> None:
    """In the process with limits: without the check it would be opened, here without end."""
    (problem,) = validate_graph(graphs.save_model(make(), tmp_path / "m.onnx")).problems
    assert problem.code == code
    assert [value for value in values if value not in problem.message] == []


@pytest.mark.parametrize(
    "make", [lambda: calling(3), lambda: looping(10), lambda: looping(2**63 - 1, stops=True)]
)
def test_terminating_functions_and_loops_are_opened(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Exporters give a loop that a condition ends the largest number of trips there is."""
    assert problems(graphs.save_model(make(), tmp_path / "m.onnx")) == {}


def reads_nothing() -> Any:
    model = graphs.one_node_model()
    model.graph.node[0].input[0] = "nowhere"
    return model


def gives_twice() -> Any:
    model = graphs.two_layer_classifier()
    model.graph.node[2].output[0] = "h1"
    return model


def no_output() -> Any:
    model = graphs.one_node_model()
    model.graph.output[0].name = "other"
    return model


def one_name_twice() -> Any:
    model = graphs.two_layer_classifier()
    model.graph.node[1].name = model.graph.node[0].name
    return model


def in_bfloat16() -> Any:
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [8, 4], np.ones(32, np.float32))
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["c", "w"], ["h"], "product"),
        helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT),
    ]
    return graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 4])], [weight], 20
    )


def without_inputs() -> Any:
    model = graphs.two_layer_classifier()
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 8), np.float32), "x"))
    return model


def a_sequence() -> Any:
    model = graphs.one_node_model("SequenceConstruct")
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(graphs.FLOAT, ["N", 8]))
    model.graph.output[0].type.CopyFrom(kind)
    return model


@pytest.mark.parametrize(("make", "code", "values"), [
    (graphs.cyclic_model, "cycle", ["Add 'one' -> Relu 'two' -> Neg 'three' -> Add 'one'"]),
    (lambda: graphs.one_node_model(opset=99), "unsupported-opset", ["99"]),
    (lambda: graphs.one_node_model("Magic", "com.evil"), "custom-operator", ["com.evil.Magic"]),
    (lambda: graphs.one_node_model("Rleu"), "unknown-operator", ["Rleu"]),
    (lambda: graphs.model_with_tensor([1 << 40, 1 << 30], b"1234"), "tensor-too-large",
     ["[1099511627776, 1073741824]", "1.18e+21"]),
    (lambda: graphs.model_with_tensor([1 << 16, 1 << 16], bytes(32)), "wrong-tensor-size",
     ["[65536, 65536]", "32 bytes"]),
    (lambda: graphs.model_with_tensor([-1, 8], bytes(32)), "negative-size", ["[-1, 8]"]),
    (lambda: nested(20), "subgraphs-too-deep", ["16"]), (recursive, "recursive-functions", [": F"]),
    (reads_nothing, "undefined-input", ["'nowhere'"]), (gives_twice, "duplicate-value", ["'h1'"]),
    (no_output, "undefined-output", ["'other'"]), (a_sequence, "not-a-tensor", ["options={'zipmap': False}"]),
    (lambda: graphs.one_node_model("Magic", "ai.onnx.ml"), "missing-operator",
     ["ai.onnx.ml.Magic", "ai.onnx.ml,"]),
    (one_name_twice, "duplicate-node-name", ["node.ClearField('name')"]),
    (in_bfloat16, "unsupported-weight-type", ["bfloat16", "float32"]), (without_inputs, "no-inputs", []),
])  # fmt: skip
def test_unrunnable_graph_is_reported_with_the_node(
    tmp_path: Path, make: Callable[[], Any], code: str, values: list[str]
) -> None:
    messages = problems(graphs.save_model(make(), tmp_path / "m.onnx"))
    assert code in messages
    assert [value for value in values if value not in messages[code]] == []


def random_graph(training: bool) -> Any:
    """Return a graph of Dropout, in training or not, and of one that is so by an input."""
    model = graphs.two_layer_classifier()
    truth = numpy_helper.from_array(np.array(training), "training")
    model.graph.initializer.append(truth)
    model.graph.node.append(helper.make_node("Dropout", ["logits", "", "training"], ["out"], "drop"))
    model.graph.output.append(graphs.value_info("out", ["N", 4]))
    return model


def test_random_nodes_are_named(tmp_path: Path) -> None:
    path = graphs.save_model(random_graph(training=True), tmp_path / "m.onnx")
    assert subprocess_main([str(path)])["details"]["random"] == ["Dropout 'drop'"]
    graphs.save_model(random_graph(training=False), path)
    assert subprocess_main([str(path)])["details"]["random"] == []
    noisy = random_graph(training=False)
    noisy.graph.node[-1].CopyFrom(helper.make_node("RandomNormalLike", ["logits"], ["out"], "noise"))
    graphs.save_model(noisy, path)
    assert subprocess_main([str(path)])["details"]["random"] == ["RandomNormalLike 'noise'"]


def test_axis_named_by_a_question_mark_has_no_name(tmp_path: Path) -> None:
    path = graphs.save_model(graphs.two_layer_classifier(batch="?"), tmp_path / "m.onnx")
    assert subprocess_main([str(path)])["signature"]["inputs"][0]["shape"] == [None, 8]


def test_several_errors_are_reported_together(tmp_path: Path) -> None:
    model = graphs.cyclic_model()
    model.opset_import[0].version = 99
    model.graph.node[0].op_type = "Nothing"
    messages = problems(graphs.save_model(model, tmp_path / "m.onnx"))
    assert list(messages) == ["unsupported-opset", "cycle", "unknown-operator"]
    assert "99" in messages["unsupported-opset"]
    assert "Nothing" in messages["unknown-operator"]


def test_weights_that_are_all_missing_are_one_error(tmp_path: Path) -> None:
    model = graphs.model_with_external_data("gone.bin")
    for name in ("second", "third"):
        model.graph.initializer.append(model.graph.initializer[0])
        model.graph.initializer[-1].name = name
    (problem,) = validate_graph(graphs.save_model(model, tmp_path / "m.onnx")).problems
    first = model.graph.initializer[0].name
    assert problem.code == "external-data-missing"
    assert [value for value in (f"'{first}'", " 2 ", "gone.bin") if value not in problem.message] == []


def test_runtime_errors_are_quoted(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.initializer[0].dims[:] = [16, 8]  # x has 8 columns
    messages = problems(graphs.save_model(model, tmp_path / "m.onnx"))
    assert list(messages) == ["session-failed"]
    assert "[ONNXRuntimeError]" in messages["session-failed"]


@pytest.mark.parametrize("kind", ["swollen", "bomb"])
def test_hostile_file_needs_little_memory_and_time(tmp_path: Path, kind: str) -> None:
    """The most that any process below this one holds at a time, and what they compute."""
    path = tmp_path / "m.onnx"
    if kind == "swollen":
        graphs.write_many_empty_nodes(path, 10_000_000)
    else:
        graphs.save_model(graphs.huge_constant_model(), path)
    script = (
        "import sys; from pathlib import Path;"
        "import numpy as np;"
        "from smelt.core.errors import InputError;"
        "from smelt.core.messages import message_codes;"
        "from smelt.runtimes.onnx_import.validate_graph import validate_graph;"
        "from smelt.runtimes.onnx_import.trial_run import trial_run;"
        "path = Path(sys.argv[1]); found = validate_graph(path); print(*message_codes(found.problems));\n"
        "try:\n    found.problems or trial_run(path, {'x': np.zeros((1, 8), np.float32)}, 'm.onnx')\n"
        "except InputError as error:\n    print(error.code, error)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # not the clock, which other work stretches
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = after.ru_maxrss * 1024
    assert done.returncode == 0, done.stderr
    codes, *error = done.stdout.splitlines()
    if kind == "swollen":
        # which limit is met first depends on the processor
        assert codes in ("memory-limit", "time-limit")
        assert error == []
    else:
        assert codes == ""
        assert error[0].startswith("graph-failed m.onnx: ")
        assert "40000000000" in error[0]  # the bytes that ONNX Runtime reports
    assert peak < 2e9
    assert took < 20
