"""The C++ example of a package computes what ONNX Runtime computes in Python.

It is built where cmake, a C++ compiler and ONNX Runtime's headers are: in the folder that
SMELT_ONNXRUNTIME_INCLUDE names (include/ of a release), or where the system has them. The library is that of
the installed onnxruntime.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from smelt.api.package import package_artifact
from smelt.core.artifact import read_artifact
from tests.support.graphs.fixed_artifacts import LENGTH, run_folder
from tests.support.graphs.standalone_packages import standalone_package

HEADER = "onnxruntime_cxx_api.h"
INCLUDE_FOLDERS = (
    "/usr/include/onnxruntime",
    "/usr/include",
    "/usr/local/include/onnxruntime",
    "/usr/local/include",
)
IDS = [[2, 7, 9, 3], [2, 5, 6, 7, 8, 3]]


def header_folder():
    """Return the folder of ONNX Runtime's C++ headers; None if there is none."""
    folders = (os.environ.get("SMELT_ONNXRUNTIME_INCLUDE"), *INCLUDE_FOLDERS)
    return next((folder for folder in folders if folder and (Path(folder) / HEADER).is_file()), None)


@pytest.fixture(scope="module")
def infer(tmp_path_factory):
    """The built example, as a function of graph, words and lines that returns rows of numbers."""
    missing = [name for name in ("cmake", "c++") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    include = header_folder()
    libraries = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    if include is None or not libraries:
        pytest.skip(f"no {HEADER} or no library: set SMELT_ONNXRUNTIME_INCLUDE to include/ of a release")
    home = tmp_path_factory.mktemp("cpp")
    (home / "libonnxruntime.so.1").symlink_to(libraries[0])  # the name that the loader looks for
    (home / "libonnxruntime.so").symlink_to("libonnxruntime.so.1")
    source = standalone_package("classifier") / "cpp"
    for command in (
        ["cmake", "-S", source, "-B", home / "build", f"-DONNXRUNTIME_INCLUDE_DIR={include}",
         f"-DONNXRUNTIME_LIBRARY={home / 'libonnxruntime.so'}"],
        ["cmake", "--build", home / "build"],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(graph, lines, *words, code=0):
        done = subprocess.run(
            [home / "build" / "infer", graph, *words], input="".join(f"{line}\n" for line in lines),
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return [[float(number) for number in row.split()] for row in done.stdout.splitlines()]

    return run


def python_rows(graph, **more):
    """Return the first output for each of `IDS`, computed by ONNX Runtime in Python."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options)
    names = {value.name for value in session.get_inputs()}
    rows = []
    for ids in IDS:
        values = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        feeds = {name: np.array([values[name]]) for name in names}
        rows.append(session.run(None, feeds | more)[0][0].tolist())
    return rows


def lines():
    return [" ".join(map(str, ids)) for ids in IDS]


@pytest.mark.parametrize("kind", ["classifier", "embedder"])
def test_outputs_equal_python(kind, infer):
    graph = standalone_package(kind) / "model.onnx"
    np.testing.assert_allclose(infer(graph, lines()), python_rows(graph), atol=1e-5)


def test_generated_ids_equal_python(infer):
    graph = standalone_package("translator") / "generate.onnx"
    expected = python_rows(graph, max_new_tokens=np.array(4))
    assert infer(graph, lines(), "max_new_tokens=4") == expected
    assert infer(graph, lines(), "max_new_tokens=2") != expected


def test_fixed_shapes_are_padded(infer, tmp_path):
    package_artifact(run_folder("classifier") / "artifacts" / "onnx", out=tmp_path / "fixed")
    graph = tmp_path / "fixed" / "model.onnx"
    session = onnxruntime.InferenceSession(str(graph))
    ids = np.array([IDS[0] + [0] * (LENGTH - len(IDS[0]))] * 2)
    mask = (np.arange(LENGTH) < len(IDS[0])).astype(np.int64)[None].repeat(2, axis=0)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    expected = session.run(None, feeds)[0][:1]
    np.testing.assert_allclose(infer(graph, lines()[:1]), expected, atol=1e-5)
    infer(graph, [" ".join(["5"] * (LENGTH + 1))], code=1)  # longer than the graph


@pytest.mark.parametrize("line", ["2 seven 3", ""])
def test_line_that_is_no_list_of_ids_is_an_error(line, infer):
    infer(standalone_package("classifier") / "model.onnx", [line], code=1)


def test_changed_example_and_its_build_do_not_invalidate_the_package(tmp_path):
    folder = tmp_path / "package"
    shutil.copytree(standalone_package("classifier"), folder)
    (folder / "cpp" / "infer.cpp").write_text("changed")
    (folder / "cpp" / "build").mkdir()
    (folder / "cpp" / "build" / "infer").write_bytes(b"program")
    read_artifact(folder).verify()


def test_packages_of_texts_have_the_example():
    assert {path.name for path in (standalone_package("classifier") / "cpp").iterdir()} == {
        "CMakeLists.txt", "infer.cpp",
    }  # fmt: skip
    assert not (standalone_package("vit") / "cpp").exists()


@pytest.mark.parametrize(("kind", "graph"), [("classifier", "model.onnx"), ("translator", "generate.onnx")])
def test_readme_has_the_build_and_the_limit(kind, graph):
    folder = standalone_package(kind)
    readme = (folder / "README.md").read_text()
    [program] = re.findall(r"^  ```bash\n(.*?)\n  ```$", readme, re.M | re.S)
    assert "cmake -S cpp -B build -D ONNXRUNTIME_ROOT=" in program
    assert f"build/infer {graph}" in program
    assert (folder / graph).is_file()
    limit = json.loads((folder / "infer.json").read_text())["tokenizer"]["limit"]
    assert f"at most {limit:,}" in readme
