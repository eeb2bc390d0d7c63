"""The format `standalone`: the artifact, with programs that run and serve it without smelt.

infer.py is the file of a task with the imported parts inlined. The parts are modules of smelt, so they are
formatted, typed and tested like all others; the result is one file that imports nothing of smelt. infer.json
has the settings with which infer.py answers as the artifact was scored. Next to them are requirements.txt, an
example request and a Dockerfile; serve.py has its own, so that infer.py needs no HTTP server.
"""

from __future__ import annotations

import ast
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact, default_threads
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.files import read_json_object, write_json
from smelt.core.system import package_versions
from smelt.data.tasks import task_traits
from smelt.export.batch_dependence import DEPENDS_ON_BATCH
from smelt.export.package.package_format import TEXT_GRAPHS, PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.export.package.write_package import copy_artifact
from smelt.models.text_rules import read_prompt_template
from smelt.runtimes.images import read_processor
from smelt.tasks.registry import all_specs, task_spec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationConfig


INFER_FILE, SERVE_FILE, INFER_SETTINGS_FILE = "infer.py", "serve.py", "infer.json"
CPP_FOLDER = "cpp"  # an example of ONNX Runtime's C++ API
REQUIREMENTS_FILE, SERVE_REQUIREMENTS_FILE = "requirements.txt", "requirements-serve.txt"


class StandaloneFormat:
    """A package that needs onnxruntime, numpy, a tokenizer library or Pillow, and to serve an HTTP server."""

    name: ClassVar[str] = "standalone"
    summary: ClassVar[str] = "graphs with infer.py and a service: onnxruntime, numpy"
    supported: ClassVar[SupportedArtifacts] = replace(
        TEXT_GRAPHS,
        tasks=frozenset(spec.name for spec in all_specs() if spec.package is not None),
        fixed_shapes=True,
    )
    is_artifact: ClassVar[bool] = True

    def check(self, artifact: Artifact) -> None:
        """Require a tokenizer that works without transformers and a generation graph; or images.

        Raises:
            InputError: it has not.
        """
        from smelt.generation.backend import GENERATION_GRAPHS
        from smelt.models.tokenizer import read_tokenizer_info

        if task_traits(artifact.manifest.task).reads_images:
            image_settings(artifact)
        if not task_traits(artifact.manifest.task).has_tokenizer:
            return
        tokenizer_info = read_tokenizer_info(artifact.path)
        if tokenizer_info.reader == "transformers":
            raise InputError(
                f"its tokenizer needs transformers ({tokenizer_info.reason}), which infer.py does not use.",
                code="unsupported-tokenizer",
            )
        lacks = [name for name in GENERATION_GRAPHS if not (artifact.path / f"{name}.onnx").is_file()]
        if task_traits(artifact.manifest.task).generates and lacks:
            hint = (
                "Third-party graphs have none; start from the folder with weights."
                if artifact.manifest.details.get("foreign")
                else "Export it with `generation_graph: true`."
            )
            raise InputError(
                f"it has no {lacks[0]}.onnx, the generation graph. {hint}",
                code="missing-graph",
                file=f"{lacks[0]}.onnx",
            )

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write the artifact, infer.py with its settings, serve.py, their requirements and a Dockerfile."""
        task = artifact.manifest.task
        settings, notes = infer_settings(artifact, origin.generation)
        traits = task_traits(task)
        readers = [settings["tokenizer"]["reader"]] if traits.has_tokenizer else []
        readers += ["pillow"] if traits.reads_images else []
        copy_artifact(artifact, folder)
        package = task_spec(task).package
        assert package is not None  # of a task in `supported`
        replaced_modules = {"tokenizers_reader": "sentencepiece_reader"} if "sentencepiece" in readers else {}
        (folder / INFER_FILE).write_text(assemble_script(package.script, replaced_modules), encoding="utf-8")
        (folder / SERVE_FILE).write_text(assemble_script("serve", {}), encoding="utf-8")
        write_json(folder / INFER_SETTINGS_FILE, settings)
        prompt_libraries = ("jinja2", "markupsafe") if traits.samples == "prompts" else ()
        libraries = dict.fromkeys((*readers, *package.libraries, *prompt_libraries))
        (folder / REQUIREMENTS_FILE).write_text(requirements_file(*libraries), encoding="utf-8")
        (folder / SERVE_REQUIREMENTS_FILE).write_text(serve_requirements_file(), encoding="utf-8")
        (folder / "Dockerfile").write_text(dockerfile(), encoding="utf-8")
        if task_traits(task).modality == "text":
            shutil.copytree(PARTS_FOLDER / CPP_FOLDER, folder / CPP_FOLDER)
            notes = [*notes, cpp_note(settings)]
        example_argument = (
            "photo.jpg" if task_traits(task).modality == "image" else task_spec(task).command_input
        )
        return UsageNotes(
            install=INSTALL_COMMAND,
            run=f"python {INFER_FILE} {example_argument}",
            examples=(
                ("bash", f"python {INFER_FILE} < lines.txt"),
                ("python", f"from infer import {package.name}\n\n{package.usage}"),
                ("bash", f"{SERVE_INSTALL_COMMAND}\npython {SERVE_FILE} --port {PORT}\n{curl_command(task)}"),
                ("bash", f"docker build -t NAME .\ndocker run --rm -p {PORT}:{PORT} NAME"),
            ),
            notes=(*notes, "The Dockerfile has not been tested: smelt is developed without Docker."),
        )


PARTS_FOLDER = Path(__file__).parent / "standalone"
_PREFIX = "smelt.export.package.standalone."
# `python infer.py` puts the folder of infer.py first on sys.path, which may contain any file
_SAFE_PATH = """\
import os
import sys

if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # no file next to this one is imported, whatever it is called"""


def assemble_script(main: str, replacements: Mapping[str, str]) -> str:
    """Return the text of infer.py.

    Args:
        main: the file in standalone/ that is placed last, and whose docstring is used.
        replacements: part -> the part that replaces it.
    """
    imports: dict[str, set[str]] = {}
    bodies: dict[str, str] = {}
    doc = _collect(main, replacements, imports, bodies)
    head = "\n\n".join([f'"""{doc}"""', _SAFE_PATH, _import_lines(imports)])
    return "\n\n\n".join([head, *bodies.values()]) + "\n"


def _collect(
    name: str, replacements: Mapping[str, str], imports: dict[str, set[str]], bodies: dict[str, str]
) -> str:
    """Add to `bodies` the code of the part `name` and the parts that it imports; return its docstring.

    imports: module -> names that are imported from it, and "" for the module itself.
    """
    text = (PARTS_FOLDER / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    last = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PREFIX):
            part = str(node.module).removeprefix(_PREFIX)
            part = replacements.get(part, part)
            if part not in bodies:
                _collect(part, replacements, imports, bodies)
        elif isinstance(node, ast.ImportFrom):
            imports.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                import_text = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                imports.setdefault(import_text, set()).add("")
        else:
            continue
        last = node.end_lineno or last
    bodies[name] = "\n".join(text.splitlines()[last:]).strip("\n")
    return ast.get_docstring(tree, clean=False) or ""


def _import_lines(imports: Mapping[str, set[str]]) -> str:
    """Return the import lines: the standard library, then the others."""
    groups: tuple[list[str], ...] = ([], [])
    for module, names in sorted(imports.items()):
        top = module.split(".")[0].split()[0]
        if top == "__future__":
            continue  # only annotations need it
        group = groups[0 if top in sys.stdlib_module_names else 1]
        group += [f"import {module}"] if "" in names else []
        imported_names = sorted(names - {""}, key=lambda name: (not name.isupper(), name))
        group += [f"from {module} import {', '.join(imported_names)}"] if imported_names else []
    ordered = (sorted(group, key=lambda line: line.startswith("from")) for group in groups)
    return "\n\n".join("\n".join(group) for group in ordered if group)


INSTALL_COMMAND = f"pip install --no-deps -r {REQUIREMENTS_FILE}"
SERVE_INSTALL_COMMAND = f"pip install --no-deps -r {SERVE_REQUIREMENTS_FILE}"
# what serve.py imports, and what these packages import
SERVE_PACKAGES = (
    "starlette",
    "uvicorn",
    "prometheus-client",
    "anyio",
    "click",
    "h11",
    "idna",
    "typing-extensions",
)
TRIM_COMMAND = (
    "cd \"$(python -c 'import site; print(site.getsitepackages()[0])')\""
    " && rm -rf numpy/tests numpy/*/tests onnxruntime/quantization onnxruntime/tools onnxruntime/transformers"
    # the library of the C API: the Python module does not load it
    " onnxruntime/capi/libonnxruntime.so.*"
)
USER, PORT = 1000, 8000  # of the container
# without the libraries of serve.py, whose import takes longer than the request
HEALTH_CHECK = (
    "import http.client, os, sys;"
    " service = http.client.HTTPConnection('127.0.0.1', int(os.environ['PORT']), timeout=4);"
    " service.request('GET', '/health');"
    " sys.exit(service.getresponse().status != 200)"
)
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # of one version they compute the same on a CPU


def requirements(reader: str, *more: str) -> list[str]:
    """Return the lines of requirements.txt: the versions that smelt runs with here.

    Args:
        reader: the library that reads texts or images: tokenizers, sentencepiece or pillow.
        more: further libraries.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    runtime = next(iter(package_versions(_RUNTIMES).values()), None)
    if runtime is None:
        raise MissingDependencyError(
            "onnxruntime is not installed. Run: pip install onnxruntime", code="not-installed"
        )
    return [
        f"numpy=={version('numpy')}",
        f"onnxruntime=={runtime}",
        *(f"{n}=={version(n)}" for n in (reader, *more)),
    ]


def requirements_file(reader: str, *more: str) -> str:
    """Return requirements.txt; infer.py does not import the packages' own dependencies."""
    return "\n".join([f"# {INSTALL_COMMAND}", *requirements(reader, *more)]) + "\n"


def serve_requirements_file() -> str:
    """Return requirements-serve.txt: requirements.txt and the HTTP server, at the versions that smelt has."""
    lines = [f"{name}=={version(name)}" for name in SERVE_PACKAGES]
    return "\n".join([f"# {SERVE_INSTALL_COMMAND}", f"-r {REQUIREMENTS_FILE}", *lines]) + "\n"


def curl_command(task: str) -> str:
    """Return the shell command that sends a request to the service."""
    url = f"http://127.0.0.1:{PORT}/predict"
    spec = task_spec(task)
    if spec.package is not None and (media := spec.package.media):
        file = {"image/jpeg": "photo.jpg"}.get(media, spec.command_input)
        return f"curl -H 'Content-Type: {media}' --data-binary @{file} {url}"
    return f"""curl --json '{{"inputs": [{spec.service_input or spec.command_input}]}}' {url}"""


def cpp_note(settings: Mapping[str, Any]) -> str:
    """Return how to build and run the C++ example, as Markdown. settings: infer.json."""
    from smelt.generation.backend import GREEDY_GRAPH

    generation = settings.get("generation", {})
    limit = settings["tokenizer"]["limit"] or generation.get("limit")
    graph = f"{GREEDY_GRAPH}.onnx" if generation else "model.onnx"
    limit_text = "" if limit is None else f", at most {limit:,} tokens"
    return f"""\
`{CPP_FOLDER}/` is an example for ONNX Runtime's C++ API: token ids in, ids or logits out. Each line of its
  input holds the ids of one text, with special tokens{limit_text}; `infer` does not truncate.

  ```bash
  cmake -S {CPP_FOLDER} -B build -D ONNXRUNTIME_ROOT=FOLDER    # an unpacked release of ONNX Runtime
  cmake --build build
  echo "4 17 92 0" | build/infer {graph}
  ```"""


def dockerfile() -> str:
    """Return a Dockerfile: the slim image of this Python, the requirements, the service, a user.

    Tests of the packages, tools that create models, and libraries for other languages are removed. The build
    fails if ONNX Runtime needs one of them. The user is a number, because Kubernetes cannot check from a name
    that it is not root.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return f"""\
FROM python:{python}-slim
RUN useradd --create-home --uid {USER} model
WORKDIR /model
COPY requirements.txt requirements-serve.txt .
RUN {SERVE_INSTALL_COMMAND} --no-cache-dir --no-compile && {TRIM_COMMAND} && python -c 'import onnxruntime'
COPY . .
USER {USER}
ENV HOST=0.0.0.0 PORT={PORT} PYTHONDONTWRITEBYTECODE=1
EXPOSE {PORT}
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "{HEALTH_CHECK}"]
CMD ["python", "serve.py"]
"""


_GRAPH_INPUTS = (
    "eos_token_ids",
    "pad_token_id",
    "decoder_start_token_id",
    "text_rules",
    "no_repeat_ngram_size",
)
_BEAM_SETTINGS = ("num_beams", "length_penalty", "early_stopping", "never_stop_early", "renormalize_logits")
_SAMPLING_SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "seed")


def infer_settings(artifact: Artifact, generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return infer.json, and notes for the README.

    Args:
        artifact: an export for ONNX Runtime on the CPU.
        generation: the recipe's `score.generation`.

    Raises:
        InputError: the graphs do not support the model's generation settings.
    """
    config = read_json_object(artifact.path / "config.json")
    task = artifact.manifest.task
    spec, notes = task_spec(task), list[str]()
    assert spec.package is not None  # of a task in `supported`
    settings: dict[str, Any] = {
        "task": task,
        "class": spec.package.name,
        "threads": default_threads(artifact.manifest),
        **spec.package_settings(config, artifact.path),
    }
    if artifact.manifest.details.get(DEPENDS_ON_BATCH):
        settings[DEPENDS_ON_BATCH] = True
    if task_traits(task).reads_images:
        settings["images"] = image_settings(artifact)
    if not task_traits(task).has_tokenizer:
        return settings, notes
    limit, tokenizer = _tokenizer_settings(artifact, config)
    settings["tokenizer"] = tokenizer
    if task_traits(task).generates:
        settings["generation"], notes = _generation_settings(artifact, config, generation)
        if not config.get("is_encoder_decoder"):  # the requested number of new tokens limits a prompt
            settings["generation"]["limit"], tokenizer["limit"] = limit, None
    if task_traits(task).samples == "prompts":
        template = read_prompt_template(artifact.path)
        assert template is not None
        settings["prompt_template"] = asdict(template)
    return settings, notes


def image_settings(artifact: Artifact) -> dict[str, Any]:
    """Return the preprocessing of images.

    Raises:
        InputError: preprocessor_config.json is missing, or smelt does not support its settings.
    """
    return asdict(read_processor(artifact.path))


def _tokenizer_settings(artifact: Artifact, config: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the maximum number of tokens of a text, None for no limit, and the tokenizer settings."""
    from smelt.generation.prompt_batches import padding_token
    from smelt.models.text_rules import NO_LIMIT, max_input_length, read_text_rules
    from smelt.models.tokenizer import (
        CLEANUP_REPLACEMENTS,
        open_tokenizer,
        read_tokenizer_info,
    )

    info, rules = read_tokenizer_info(artifact.path), read_text_rules(artifact.path)
    tokenizer = open_tokenizer(artifact.path)
    limit: Any = max_input_length(tokenizer, config)
    limit = min(limit, artifact.manifest.details.get("sequence_length") or limit)
    limit = None if limit >= NO_LIMIT else limit
    pads_left = (
        not config.get("is_encoder_decoder") and task_traits(artifact.manifest.task).architecture == "decoder"
    )
    pad = padding_token(tokenizer) if pads_left else tokenizer.pad_token_id or 0
    tokenizer_fields = info.model_dump(exclude={"reason", "longest", "clean_up"})
    task_fields = {
        "replace": CLEANUP_REPLACEMENTS if info.clean_up else [],
        "prefix": rules.prefix,
        "lower": rules.lower,
    }
    return limit, {**tokenizer_fields, "pad": pad, "limit": limit, **task_fields}


def _generation_settings(
    artifact: Artifact, config: dict[str, Any], requested: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the complete generation settings, and notes about them."""
    from smelt.generation.config import GenerationSettings, resolve_generation
    from smelt.generation.runner import read_model_files
    from smelt.generation.search import graph_supports

    notes = []
    if requested.get("do_sample"):
        notes = ["The recipe draws tokens at random; infer.py uses the most likely token of each step."]
        requested = {name: value for name, value in requested.items() if name not in _SAMPLING_SETTINGS}
    model: Any = read_model_files(artifact.path)
    decoding = resolve_generation(GenerationSettings(**requested), model)
    if not graph_supports(decoding):
        raise InputError(
            "its generation settings contain bad_words_ids of several tokens, or remove_invalid_values. The"
            " generation graph supports neither. Remove them from the recipe or generation_config.json.",
            code="unsupported-generation-setting",
        )
    return search_settings(decoding, int(config.get("decoder_vocab_size") or config["vocab_size"])), notes


def search_settings(decoding: GenerationConfig, vocabulary: int) -> dict[str, Any]:
    """Return the search settings: rules that infer.py builds, and inputs that it passes to the graph."""
    from smelt.generation.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH
    from smelt.generation.search import generation_feeds

    feeds = generation_feeds(decoding, len(decoding.decoder_prompt) or 1, vocabulary)
    single_token_prompt = decoding.start is not None  # so the longest output is known
    copied_fields = (
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "min_length",
        "positions",
        "repetition_penalty",
    )
    first = decoding.forced_bos_token_id
    return {
        "graph": f"{BEAM_SEARCH_GRAPH if decoding.num_beams > 1 else GREEDY_GRAPH}.onnx",
        **{name: getattr(decoding, name) for name in copied_fields},
        **({"max_new_tokens": decoding.max_new_after_start} if single_token_prompt else {}),
        "eos": decoding.eos,
        # as in the rules, an end token is not a bad word
        "bad_words": [
            token_ids[0] for token_ids in decoding.bad_words_ids if token_ids[0] not in decoding.eos
        ],
        "suppressed": decoding.suppress_tokens,
        "suppressed_first": decoding.begin_suppress_tokens,
        "forced_bos": [] if first is None else [first],
        "forced_eos": decoding.forced_eos_token_id,
        "vocabulary": vocabulary,
        "inputs": {name: feeds[name].tolist() for name in (*_GRAPH_INPUTS, *_BEAM_SETTINGS) if name in feeds},
    }
