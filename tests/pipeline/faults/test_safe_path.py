"""A folder that was downloaded may hold any Python files: no command runs one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.graphs import imported_graphs as graphs
from tests.support.graphs.standalone_packages import standalone_package
from tests.support.models import tiny

NAMES = (
    "smelt", "json", "torch", "numpy", "onnxruntime", "pickle", "transformers", "tensorrt", "sitecustomize",
)  # fmt: skip
PLANTED = """import pathlib
with pathlib.Path({marks!r}).open("a") as stream:
    stream.write(__name__ + " ")
"""
TEXTS = """
model: m
task: translation
data: {test: data.jsonl}
stages: [onnx: {target: ort-cpu}]
score: {latency: false, generation: {max_new_tokens: 4}}
"""
WARNINGS = ("UserWarning", "FutureWarning", "DeprecationWarning", "TracerWarning", "nn_module_stack")
ARRAYS = "model: g.onnx\ntask: custom\ndata: {test: rows.npz}\nstages: [quantize-onnx: {}]\n"
ONNX = "run/artifacts/onnx"
COMMANDS = [
    ["stages", "prune"], ["doctor"], ["init", "g.onnx", "--out", "made.yaml"], ["plan", "graph.yaml"],
    ["tensorrt-check", "g.onnx"], ["run", "recipe.yaml", "--out", "run", "--quiet"], ["report", "run"],
    ["predict", ONNX, "dogs"], ["eval", ONNX, "--data", "data.jsonl"],
    ["bench", ONNX, "--rounds", "3", "--texts", "2", "--batch-size", "1"],
    ["package", ONNX, "--out", "shipped"], ["store", "list", "--store", "."],
    ["store", "check", "--store", "."],
]  # fmt: skip
# as the console script `smelt` begins: its own folder is first on sys.path
DRIVE = """
import json, sys
from smelt.cli.main import main
codes = {}
for command in json.loads(sys.argv[1]):
    try:
        codes[" ".join(command)] = main(command, standalone_mode=False)
    except SystemExit as error:
        codes[" ".join(command)] = error.code
print("\\n" + json.dumps(codes))
"""


def plant(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Write modules that leave their names in a file when they run; return that file."""
    marks = folder / "ran.txt"
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED.format(marks=str(marks)))
    return marks


def python(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip


@pytest.mark.slow
def test_commands_do_not_import_files_of_current_folder(tmp_path: Path) -> None:
    """Nor does one print warnings of torch: pytest catches those of its own process."""
    home = tmp_path / "download"
    tiny.write_marian(home / "m")
    tiny.write_pairs(home / "data.jsonl", 4)
    graphs.save_model(graphs.two_layer_classifier(), home / "g.onnx")
    graphs.write_rows(home / "rows.npz")
    (home / "recipe.yaml").write_text(TEXTS)
    (home / "graph.yaml").write_text(ARRAYS)
    marks = plant(home)
    (tmp_path / "drive.py").write_text(DRIVE)
    done = python(home, tmp_path / "drive.py", json.dumps(COMMANDS))
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert {command: code for command, code in codes.items() if code} == {}, done.stdout + done.stderr
    assert not marks.exists(), marks.read_text()
    assert [warning for warning in WARNINGS if warning in done.stdout + done.stderr] == []


def test_python_m_smelt_imports_no_other_file_of_current_folder(tmp_path: Path) -> None:
    """`smelt.py` itself is for Python to find: `python -P -m smelt`, or the command `smelt`."""
    marks = plant(tmp_path, tuple(name for name in NAMES if name != "smelt"))
    done = python(tmp_path, "-m", "smelt", "stages", "prune")
    assert (done.returncode, done.stderr) == (0, "")
    assert not marks.exists(), marks.read_text()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What infer.py prints where nothing is planted."""
    package = standalone_package("classifier")
    return python(tmp_path_factory.mktemp("empty"), "-B", package / "infer.py", "dogs").stdout


@pytest.mark.parametrize("where", ["current", "own"])
def test_infer_py_imports_no_file_of_current_or_own_folder(where: str, expected: str, tmp_path: Path) -> None:
    package = standalone_package("classifier")
    if where == "own":
        package_copy = tmp_path / "package"
        package_copy.mkdir()
        for path in package.iterdir():
            (package_copy / path.name).symlink_to(path)
        (package_copy / "infer.py").unlink()
        (package_copy / "infer.py").write_bytes((package / "infer.py").read_bytes())
        package = package_copy
    marks = plant(package if where == "own" else tmp_path, ("json", "numpy", "tokenizers", "onnxruntime"))
    done = python(tmp_path if where == "current" else package, "-B", package / "infer.py", "dogs")
    assert done.stdout == expected != "", done.stderr
    assert not marks.exists(), marks.read_text()
