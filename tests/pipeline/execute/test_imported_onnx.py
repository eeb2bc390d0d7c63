"""A graph becomes the first artifact: a copy that says what it is, made once."""

from pathlib import Path
from typing import Any

import pytest

from smelt.core.store import Store
from smelt.data.splits import Columns
from smelt.pipeline.execute import sources
from smelt.pipeline.execute.step_runner import StepRunner
from smelt.pipeline.inspect.model_info import OnnxModel
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.validate_graph import subprocess_main
from smelt.tasks.read_split import read_split
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick


class Silent:
    """A display of nothing."""

    log_path = Path("log.txt")

    def line(self, text: str) -> None:
        raise AssertionError(text)


def model_in(path: Path) -> OnnxModel:
    response = subprocess_main([str(path)])
    return OnnxModel(
        path,
        GraphSignature.model_validate(response["signature"]),
        tuple(response["files"]),
        None,
        response["details"],
    )


def test_imported_onnx_model_is_complete_artifact_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_runs: list[Any] = []
    monkeypatch.setattr(
        "smelt.runtimes.onnx_import.trial_run.trial_run", lambda *args: trial_runs.append(args)
    )
    path = graphs.save_model(graphs.two_layer_classifier(batch=4), tmp_path / "m.onnx", "weights.bin")
    rows = read_split(str(graphs.write_rows(tmp_path / "test.npz")), "custom", Columns(), tmp_path)
    shop: Any = StepRunner(
        Store(tmp_path / "store"),
        "custom",
        {"test": rows},
        0,
        1,
        None,
        Silent(),
        {},  # type: ignore[arg-type]
    )
    artifact, cached = sources.import_onnx_model(shop, model_in(path), {"test": rows}, rebuild=False)
    assert not cached
    assert sorted(artifact.manifest.files) == ["model.onnx", "model.onnx_data", "signature.json"]
    assert (artifact.format, artifact.manifest.details["foreign"], artifact.manifest.details["opset"]) == (
        "onnx",
        True,
        17,
    )
    assert [feeds["x"].shape for _, feeds, _ in trial_runs] == [(4, 8)]  # as many rows as the graph takes
    artifact.verify()
    second_artifact, cached = sources.import_onnx_model(shop, model_in(path), {"test": rows}, rebuild=False)
    assert cached
    assert second_artifact.key == artifact.key
    # other weights in the file next to it are another model
    (tmp_path / "weights.bin").write_bytes(bytes((tmp_path / "weights.bin").stat().st_size))
    other, _ = sources.import_onnx_model(shop, model_in(path), {"test": rows}, rebuild=False)
    assert other.key != artifact.key
