"""What is the same around every form: README.md, SHA256SUMS, the manifest, real files."""

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from smelt.core.artifact import MASTER_WEIGHTS_FILE, FileRecord, read_artifact
from smelt.core.errors import InputError
from smelt.core.files import write_hashed_json
from smelt.export.package.package_format import (
    OriginScore,
    OriginStep,
    PackageOrigin,
    SupportedArtifacts,
    UsageNotes,
)
from smelt.export.package.write_package import copy_artifact, write_package
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts

HOW = UsageNotes("fetch it", "open it", (("python", "import it"),), ("Mind the gap.",))
ORIGIN = PackageOrigin(
    run="translate",
    model="my-model",
    license="apache-2.0 (its model card)",
    steps=(
        OriginStep("model", "model", {}),
        OriginStep("small", "prune", {"targets": ["ffn"], "keep_ratio": 0.5}),
    ),
    scores=(OriginScore("BLEU", "37.41 [36.10, 38.60]", "38.00 [37.00, 39.00]", 1000, "nrefs:1|gen:greedy"),),
    latencies=("3.7 ms (median) at batch 1",),
)


class Copies:
    """Copies the artifact, with one file more in a folder."""

    name, summary, is_artifact = "copies", "a copy", True
    supported = SupportedArtifacts(frozenset({"onnx"}))

    def write(self, artifact, origin, folder):
        copy_artifact(artifact, folder)
        (folder / "more").mkdir()
        (folder / "more" / "words.json").write_text("{}")
        (folder / "infer.py").write_text("pass")
        return HOW


@pytest.fixture(scope="module")
def artifact():
    return read_artifact(exported_artifacts.exported_artifact("classifier"))


@pytest.fixture(scope="module")
def package(artifact, tmp_path_factory):
    return write_package(Copies(), artifact, ORIGIN, tmp_path_factory.mktemp("out") / "mine")


def test_files_are_copies_without_links(package, artifact):
    for name in artifact.manifest.files:
        path, source = package.folder / name, artifact.path / name
        assert path.read_bytes() == source.read_bytes()
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1
        assert path.stat().st_ino != source.stat().st_ino


def test_master_weights_are_not_packaged(artifact, tmp_path):
    artifact_folder = tmp_path / "artifact"
    shutil.copytree(artifact.path, artifact_folder)
    (artifact_folder / MASTER_WEIGHTS_FILE).write_bytes(b"floats")
    files = artifact.manifest.files | {MASTER_WEIGHTS_FILE: FileRecord(sha256="0" * 64, size_bytes=6)}
    trained = replace(
        artifact, path=artifact_folder, manifest=artifact.manifest.model_copy(update={"files": files})
    )
    package_info = write_package(Copies(), trained, ORIGIN, tmp_path / "mine")
    assert not list(package_info.folder.rglob(MASTER_WEIGHTS_FILE))
    assert MASTER_WEIGHTS_FILE not in read_artifact(package_info.folder).manifest.files
    assert MASTER_WEIGHTS_FILE not in (package_info.folder / "SHA256SUMS").read_text()


@pytest.mark.parametrize("depends", [True, False])
def test_package_warns_if_answers_depend_on_batch(artifact, tmp_path, depends):
    details = artifact.manifest.details | {"depends_on_batch": depends}
    dependent = replace(artifact, manifest=artifact.manifest.model_copy(update={"details": details}))
    package_info = write_package(Copies(), dependent, ORIGIN, tmp_path / "mine")
    codes = [message.code for message in package_info.warnings]
    assert codes == ["answers-depend-on-batch"] * depends
    readme = (package_info.folder / "README.md").read_text()
    assert all(message.message in readme for message in package_info.warnings)


def test_sha256sums_lists_every_file(package, tmp_path):
    lines = (package.folder / "SHA256SUMS").read_text().splitlines()
    options = {line[66:]: line[:64] for line in lines}
    package_files = {
        p.relative_to(package.folder).as_posix(): p for p in package.folder.rglob("*") if p.is_file()
    }
    assert set(options) == set(package_files) - {"SHA256SUMS"}
    assert {"manifest.json", "README.md", "more/words.json"} <= set(options)
    for name, digest in options.items():
        assert hashlib.sha256(package_files[name].read_bytes()).hexdigest() == digest
    if shutil.which("sha256sum"):
        done = subprocess.run(
            ["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=package.folder, check=False, capture_output=True
        )
        assert (done.returncode, done.stdout) == (0, b"")


def test_manifest_lists_loaded_files_only(package, artifact):
    packaged = read_artifact(package.folder)
    packaged.verify()
    assert set(packaged.manifest.files) == {*artifact.manifest.files, "more/words.json"}
    assert packaged.manifest.model_copy(update={"files": artifact.manifest.files}) == artifact.manifest


def test_format_with_own_layout_has_no_manifest(artifact, tmp_path):
    form = Copies()
    form.is_artifact = False
    package = write_package(form, artifact, PackageOrigin(), tmp_path / "p")
    assert not (package.folder / "manifest.json").exists()


def test_readme_contains_all_sections(package, artifact):
    text = (package.folder / "README.md").read_text()
    assert text.startswith("# mine\n")
    for part in (
        "| made from | my-model |",
        "| run | translate |",
        "| format | onnx, exported for ort-cpu |",
        f"`{artifact.key}`",
        '| small | prune | targets: ["ffn"], keep_ratio: 0.5 |',
        "| BLEU | 37.41 [36.10, 38.60] | 1,000 | 38.00 [37.00, 39.00] |",
        "nrefs:1|gen:greedy",
        "3.7 ms (median) at batch 1",
        f"{artifact.size_bytes:,} bytes",
        "```bash\nfetch it\nopen it\n```",
        "```python\nimport it\n```",
        "Mind the gap.",
        "apache-2.0 (its model card)",
        "sha256sum -c SHA256SUMS",
    ):
        assert part in text, part


def test_untrusted_text_is_escaped_in_readme(artifact, tmp_path):
    markup = "<img src=x> [a](b) `c` | *d*\n## e"
    origin = replace(
        ORIGIN,
        run=markup,
        model=markup,
        license=markup,
        steps=(OriginStep(markup, "prune", {"targets": markup}),),
        scores=(OriginScore(markup, "1", markup, 10, markup),),
        latencies=(markup,),
    )
    text = (write_package(Copies(), artifact, origin, tmp_path / markup[:4]).folder / "README.md").read_text()
    tokens = MarkdownIt().enable("table").parse(text)
    inner_tokens = [inner for token in tokens for inner in token.children or ()]
    assert not {"image", "link_open", "html_inline", "em_open"} & {token.type for token in inner_tokens}
    assert "html_block" not in {token.type for token in tokens}
    headings = [
        tokens[position + 1].content for position, token in enumerate(tokens) if token.type == "heading_open"
    ]
    assert [name for name in headings if name.strip() == "e"] == []
    cells = [
        sum(inner.type == "td_open" for inner in tokens[position : tokens.index(end, position)])
        for position, token in enumerate(tokens)
        if token.type == "tr_open"
        for end in [next(t for t in tokens[position:] if t.type == "tr_close")]
    ]
    assert set(cells) <= {0, 2, 3, 4}
    shown_texts = [
        "".join(part.content for part in token.children or () if part.type == "text") for token in tokens
    ]
    assert any(" ".join(markup.split()) in shown_text for shown_text in shown_texts)


def test_tampered_artifact_is_rejected(artifact, tmp_path):
    artifact_folder = tmp_path / "artifact"
    shutil.copytree(artifact.path, artifact_folder)
    (artifact_folder / "numpy.py").write_text("print('here')")
    manifest = json.loads((artifact_folder / "manifest.json").read_text())
    digest = hashlib.sha256((artifact_folder / "numpy.py").read_bytes()).hexdigest()
    manifest["files"]["numpy.py"] = {"sha256": digest, "size_bytes": 13}
    write_hashed_json(artifact_folder / "manifest.json", manifest)
    for form in ("standalone", "huggingface", "optimum"):
        harness.smelt("package", artifact_folder, "--format", form, "--out", tmp_path / form, code=2)
        assert not (tmp_path / form).exists()


def test_unknown_values_are_reported(artifact, tmp_path):
    text = (
        write_package(Copies(), artifact, PackageOrigin(), tmp_path / "p").folder / "README.md"
    ).read_text()
    assert "smelt eval" in text.partition("## Scores")[2]
    assert "made from | unknown" in text
    assert "not stated" in text
    unscored = replace(ORIGIN, scores=())
    text = (write_package(Copies(), artifact, unscored, tmp_path / "q").folder / "README.md").read_text()
    assert "smelt eval" in text.partition("## Scores")[2]


def test_failed_format_removes_its_output(artifact, tmp_path, monkeypatch):
    def fails(self, artifact, origin, folder):
        copy_artifact(artifact, folder)
        raise InputError("not this one", code="made-up")

    monkeypatch.setattr(Copies, "write", fails)
    with raises_code("made-up", InputError):
        write_package(Copies(), artifact, PackageOrigin(), tmp_path / "p")
    assert list(tmp_path.iterdir()) == []
