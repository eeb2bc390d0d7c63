"""The requirements of packages in an environment of their own: infer.py answers there as smelt does.

Half a minute on an idle machine: pip fetches some 60 MB.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smelt
from smelt.export.package.standalone_format import INSTALL_COMMAND, TRIM_COMMAND
from tests.support.graphs import exported_artifacts
from tests.support.graphs.standalone_packages import GENERATION_SETTINGS, TEXTS, standalone_package
from tests.support.models import images, tiny
from tests.support.processes.services import run_service
from tests.support.shared_folders import make_once

KINDS = ("translator", "t5", "gpt2", "classifier", "embedder", "vit")
PILLOW = ("PIL", "pillow.libs", "pillow")  # for images alone
LINES = [text for text in [*TEXTS[:12], tiny.SENTENCES[0] + "\tdogs"] if "\t" not in text]


class NoNetworkError(Exception):
    """The packages cannot be fetched."""


def run(folder, *command, lines=None):
    return subprocess.run(
        command, cwd=folder, input=lines, capture_output=True, encoding="utf-8", timeout=300, check=False,
        env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "HOME": str(folder)}
        | {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "http"))},
    )  # fmt: skip


def make(home):
    """Make an environment with what the packages of all tasks require."""
    home.mkdir()
    done = run(home, sys.executable, "-m", "venv", home / "venv")
    assert done.returncode == 0, done.stderr
    files = [standalone_package(kind) / "requirements.txt" for kind in KINDS]
    files.append(standalone_package(KINDS[0]) / "requirements-serve.txt")
    lines = {line for path in files for line in path.read_text().splitlines()}
    requirements = {line for line in lines if not line.startswith("-r ")}
    (home / "requirements.txt").write_text("\n".join(sorted(requirements)) + "\n")
    command = [
        *INSTALL_COMMAND.split(),
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-compile",
    ]
    done = run(home, home / "venv" / "bin" / "python", "-m", *command)
    if done.returncode != 0:
        raise NoNetworkError(done.stderr.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def python():
    if sys.platform == "win32":
        pytest.skip("the paths are those of Linux and macOS")
    try:
        return make_once("package-environment", make) / "venv" / "bin" / "python"
    except NoNetworkError as error:
        pytest.skip(f"pip cannot fetch the requirements: {error}")


def site(python):
    site_path = run(
        python.parent, python, "-c", "import site; print(site.getsitepackages()[0])"
    ).stdout.strip()
    return Path(site_path)


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_infer_script_equals_smelt_predictions(kind, python, tmp_path):
    folder = standalone_package(
        kind, GENERATION_SETTINGS["rules"] if kind in ("translator", "t5", "gpt2") else None
    )
    with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
        if kind == "classifier":
            expected = [f"{p.label}\t{p.probabilities[p.label]:.3f}" for p in model.predict(LINES)]
        elif kind == "embedder":
            expected = [json.dumps([round(float(x), 7) for x in vector]) for vector in model.embed(LINES)]
        else:
            expected = model.generate(LINES, **GENERATION_SETTINGS["rules"])
    done = run(folder, python, "-B", "infer.py", lines="".join(f"{line}\n" for line in LINES))
    assert done.returncode == 0, done.stderr
    # what comes through a pipe as text has other ends of lines
    assert done.stdout == "".join(f"{text}\n" for text in expected).replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.peers
def test_images_are_classified_in_minimal_environment(python, tmp_path):
    images.make_image(1).save(tmp_path / "a.png")
    with smelt.load(exported_artifacts.exported_artifact("vit")) as model:
        [expected] = model.classify([tmp_path / "a.png"])
    done = run(standalone_package("vit"), python, "-B", "infer.py", tmp_path / "a.png")
    assert done.stdout == f"{expected.label}\t{expected.probabilities[expected.label]:.3f}\n", done.stderr
    command = [str(python), "-B", "serve.py", "--port", "0"]
    with run_service(*command[1:], folder=standalone_package("vit"), python=command[0]) as service:
        data = (tmp_path / "a.png").read_bytes()
        status, _, body = service.request("POST", "/predict", data, {"Content-Type": "image/png"})
        assert (status, json.loads(body)["outputs"][0]["label"]) == (200, expected.label)


@pytest.mark.peers
def test_environment_has_no_torch_or_transformers_and_is_small(python):
    for name in ("torch", "transformers", "smelt", "onnx"):
        done = run(python.parent, python, "-c", f"import {name}")
        assert "ModuleNotFoundError" in done.stderr
    not_counted = ("pip", "setuptools", "pkg_resources", "_distutils_hack", *PILLOW)
    size = 0
    for path in site(python).rglob("*"):
        relative_parts = path.relative_to(site(python)).parts
        if (
            path.is_file()
            and "__pycache__" not in relative_parts
            and relative_parts[0].split("-")[0] not in not_counted
        ):
            size += path.stat().st_size
    assert size < 145e6  # both tokenizers; docs/how-to/deploy.md has the size with one of them


@pytest.mark.peers
def test_packages_removed_by_dockerfile_are_not_needed(python, tmp_path):
    import shutil

    copy = tmp_path / "site"
    shutil.copytree(site(python), copy, ignore=shutil.ignore_patterns("pip*", "setuptools*", "__pycache__"))
    trim = TRIM_COMMAND.split("&&", 1)[1]
    assert run(copy, "sh", "-c", trim).returncode == 0
    assert not (copy / "numpy" / "tests").exists()
    assert not (copy / "onnxruntime" / "tools").exists()
    assert not list((copy / "onnxruntime" / "capi").glob("libonnxruntime.so*"))
    for name in PILLOW:
        shutil.rmtree(copy / name, ignore_errors=True)
    assert sum(path.stat().st_size for path in copy.rglob("*") if path.is_file()) < 105e6  # both tokenizers
    code = f"import sys; sys.path.insert(0, {str(copy)!r}); sys.argv = ['infer.py', 'two dogs'];"
    code += "import runpy; runpy.run_path('infer.py', run_name='__main__')"
    for kind in ("translator", "t5", "classifier"):
        done = run(standalone_package(kind), python, "-B", "-S", "-c", code)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == run(standalone_package(kind), python, "-B", "infer.py", "two dogs").stdout != ""
