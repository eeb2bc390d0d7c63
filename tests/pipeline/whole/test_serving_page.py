"""The infer.py of docs/how-to/serve.md, run as it stands there behind the service of a package."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import smelt
from tests.support.graphs import exported_artifacts
from tests.support.graphs.standalone_packages import standalone_package
from tests.support.models import tiny
from tests.support.processes.services import run_service

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    package = tmp_path_factory.mktemp("service")
    shutil.copy(standalone_package("translator") / "serve.py", package)
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    (package / "infer.py").write_text(code)
    [settings] = re.findall(r"^echo '(.*)' > infer.json$", PAGE, flags=re.M)
    (package / "infer.json").write_text(settings)
    return package


def test_concurrent_requests_equal_single_requests(folder):
    requests = [[tiny.SENTENCES[i % len(tiny.SENTENCES)]] * (1 + i % 2) for i in range(24)]
    artifact = exported_artifacts.exported_artifact("translator")
    with smelt.load(artifact, threads=1) as model:
        expected = [(200, model.generate(texts, max_new_tokens=64)) for texts in requests]
    command = ("serve.py", "--port", "0", "--workers", "2")
    with (
        run_service(*command, folder=folder, environment={"ARTIFACT": str(artifact)}) as service,
        ThreadPoolExecutor(8) as pool,
    ):
        assert list(pool.map(lambda texts: service.predict(*texts), requests)) == expected
        assert service.metric("smelt_inputs_cut_total") == 0
        service.predict(" ".join(tiny.SENTENCES * 3))
        assert service.metric("smelt_inputs_cut_total") == 1
