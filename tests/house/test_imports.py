"""Importing smelt loads no large library, and nothing optional is needed."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.support.models import tiny

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "package-dir"
]
HEAVY = ["torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnxsim", "tensorrt", "openvino"]
HEAVY += ["datasets", "sklearn", "sacrebleu", "pandas", "scipy", "accelerate", "rich", "matplotlib"]
EXTRAS = ["tensorrt", "tensorrt_bindings", "openvino", "bitsandbytes"]
EXTRAS += ["tensorboard", "mlflow", "wandb", "swanlab", "trackio", "ray", "s3fs"]


def modules() -> dict[str, Path]:
    """Every module of smelt: dotted name to file."""
    paths_by_module = {}
    for package, folder in PACKAGE_DIR.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            components = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *components]).removesuffix(".__init__")
            paths_by_module[name] = path
    return paths_by_module


def stage_modules() -> list[str]:
    """Modules with a class that has a `settings_type`: the stages, wherever the table puts them."""
    names = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and name != "smelt.stage":
                fields = {ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)}
                fields |= {ast.unparse(t) for f in node.body if isinstance(f, ast.Assign) for t in f.targets}
                if "settings_type" in fields:
                    names.append(name)
    return sorted(set(names))


def python(code: str) -> Any:
    """Run `code` in a new interpreter, outside the tree; return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path.home(),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded_after(*imports: list[str]) -> Any:
    """Which heavy packages are loaded once the first names are imported, then the next ones, and so on."""
    return python(
        "import importlib, json, sys\n"
        "found = []\n"
        f"for names in {imports!r}:\n"
        "    for name in names: importlib.import_module(name)\n"
        f"    found.append(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
        "print(json.dumps(found))"
    )


def test_imports_load_no_heavy_packages_and_onnx_loads_only_onnxruntime() -> None:
    core = [name for name in modules() if name.startswith("smelt.core")]
    assert len(core) > 4
    assert len(stage_modules()) >= 7
    predict = ["smelt.api.load", "smelt.api.predict", "smelt.runtimes.predict_texts"]
    runtime = ["smelt.runtimes.registry", "smelt.runtimes.onnx_backend"]
    heavy_modules = loaded_after(["smelt", "smelt.cli.main", *core], stage_modules(), predict, runtime)
    assert heavy_modules == [[], [], [], ["onnxruntime"]]


def test_cli_help_does_not_import_pydantic() -> None:
    """Half of the time of `smelt --help` was its import."""
    code = "import json, sys, smelt.cli.main; print(json.dumps('pydantic' in sys.modules))"
    assert python(code) is False


def test_plan_of_quickstart_imports_no_heavy_packages() -> None:
    """The import of torch and transformers takes four of the five seconds that a plan would take."""
    code = (
        "import json, sys\nfrom smelt.pipeline.plan.load_plan import load_plan\nload_plan('quickstart')\n"
        f"print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    )
    assert python(code) == []


MEASURING = (
    "factorize.svd", "prune.importances.scores", "prune.width", "drop_layers.select_layers",
    "drop_layers.drop_parts", "quantize.ranges",
)  # fmt: skip


def test_measuring_imports_no_trainer_and_modules_import_without_extras(tmp_path: Path) -> None:
    """The import of transformers' Trainer takes seconds and brings peft and bitsandbytes along.

    Babel, which the recipe of the example model needs, is a tool of the extra "dev" and is there.
    """
    model, measuring = tiny.write_bert(tmp_path / "words"), [f"smelt.compress.{name}" for name in MEASURING]
    (tmp_path / "out").mkdir()
    names = [name for name in modules() if not name.endswith("__main__")]
    code = (
        "import importlib, json, sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        absent = name.split('.')[0] in {EXTRAS!r}\n"
        "        return None if absent else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
        "from pathlib import Path\n"
        "from smelt.core.files import read_json_object\nfrom smelt.models.new_model import create_model\n"
        f"for name in {measuring!r}: importlib.import_module(name)\n"
        f"words, out = Path({str(model)!r}), Path({str(tmp_path / 'out')!r})\n"
        "config = read_json_object(words / 'config.json')\n"
        "create_model(config, words, out, task='text-classification', seed=1, labels=[], problem=None)\n"
        "trainers = {'peft', 'transformers.trainer', 'transformers.trainer_utils'}\n"
        "found = sorted(trainers & sys.modules.keys())\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(json.dumps([found, sorted(set({EXTRAS!r}) & set(sys.modules))]))"
    )
    assert python(code) == [[], []]
