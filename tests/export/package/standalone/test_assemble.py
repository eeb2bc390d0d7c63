"""infer.py and serve.py are readable files that import little and need no part of smelt."""

import ast
import subprocess
import sys

import pytest

from smelt.export.package.standalone_format import PARTS_FOLDER, assemble_script
from smelt.tasks.registry import all_specs

pytestmark = pytest.mark.quick

MAINS = sorted({task.package.script for task in all_specs() if task.package is not None})
VARIANTS = [(main, {}) for main in MAINS]
SERVE = ("serve", {})
VARIANTS += [("translation", {"tokenizers_reader": "sentencepiece_reader"})]
READERS = {"tokenizers", "sentencepiece", "PIL"}
ALLOWED = {"numpy", "onnxruntime", *READERS, *sys.stdlib_module_names}


def imported(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize(("main", "instead"), VARIANTS)
def test_script_imports_runtime_numpy_and_one_tokenizer(main, instead):
    tops = {name.split(".")[0] for name in imported(assemble_script(main, instead))}
    more = {"text_generation": {"jinja2"}, "speech_recognition": {"soundfile", "scipy"}}
    assert tops <= ALLOWED | more.get(main, set())
    assert len(tops & READERS) == (2 if main == "image_text" else 1)


def test_service_imports_http_server_and_standard_library():
    tops = {name.split(".")[0] for name in imported(assemble_script(*SERVE))}
    assert tops - set(sys.stdlib_module_names) == {"prometheus_client", "starlette", "uvicorn"}


def test_scripts_pass_lint_and_format_checks(tmp_path):
    for variant_index, (main, replaced) in enumerate([*VARIANTS, SERVE]):
        (tmp_path / f"infer{variant_index}.py").write_text(assemble_script(main, replaced))
    settings = ["--isolated", "--line-length", "110", "--target-version", "py311"]
    for ruff_args in (["check", "--select", "E,F,I,B,UP,D101,D102,D103"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *ruff_args, *settings, tmp_path]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_is_used_in_a_script():
    texts = [assemble_script(main, replaced) for main, replaced in [*VARIANTS, SERVE]]
    for path in PARTS_FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for name in names:
            assert any(f" {name}(" in text or f" {name}:" in text for text in texts), (path.name, name)
