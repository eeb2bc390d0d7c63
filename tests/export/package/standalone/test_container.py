"""What the Dockerfile of a package says, done without Docker: its service answers as smelt does."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import smelt
from tests.support.graphs import exported_artifacts
from tests.support.graphs.standalone_packages import TEXTS, standalone_package
from tests.support.models import images, tiny
from tests.support.processes.services import container, read_dockerfile

LABELED = [*tiny.SENTENCES, "\u732b \U0001f680", ("a man", "two dogs run")]


def files(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


def smelt_says(kind, call):
    with smelt.load(exported_artifacts.exported_artifact(kind), threads=1) as model:
        return call(model)


def test_container_runs_unprivileged_and_listens_on_all_addresses():
    package = standalone_package("translator")
    dockerfile = read_dockerfile(package / "Dockerfile")
    assert re.fullmatch(r"python:3\.\d+-slim", dockerfile.base)
    assert dockerfile.ports == [int(dockerfile.environment["PORT"])] == [8000]
    assert dockerfile.environment["HOST"] == "0.0.0.0"
    assert dockerfile.start == ["python", "serve.py"]
    assert dockerfile.check[:2] == ["python", "-c"]
    assert int(dockerfile.user) > 0  # a number: Kubernetes has to see that it is not root
    assert any(f"--uid {dockerfile.user} " in command for command in dockerfile.commands)
    assert dockerfile.order.index("USER") > max(
        position for position, instruction in enumerate(dockerfile.order) if instruction in ("RUN", "COPY")
    )
    assert all((package / source).exists() for *sources, _ in dockerfile.copies for source in sources)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    with container(
        standalone_package("translator"), tmp_path_factory.mktemp("c"), WORKERS="2"
    ) as container_info:
        yield container_info


@pytest.mark.filterwarnings("ignore::smelt.core.errors.TruncationWarning")
def test_concurrent_requests_return_smelt_predictions(translator):
    service, _, folder = translator
    files_before = files(folder)
    expected = smelt_says("translator", lambda m: [m.generate([t], max_new_tokens=4) for t in TEXTS])
    with ThreadPoolExecutor(8) as callers:
        responses = list(callers.map(service.predict, TEXTS * 4))
    assert responses == [(200, answer) for answer in expected * 4]
    assert service.metric("smelt_inputs_total") == 4 * len(TEXTS)
    assert service.metric("smelt_inputs_cut_total") == 4
    assert files(folder) == files_before  # it runs where nothing may be written


def test_health_check_of_the_dockerfile_exits_with_the_service_state(translator):
    service, dockerfile, folder = translator
    for port, code in ((service.port, 0), (1, 1)):
        environment = {**dockerfile.environment, "PORT": str(port), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, *dockerfile.check[1:]], cwd=folder, env=environment, check=False
        )
        assert done.returncode == code


def test_readme_command_works(translator):
    service, _, _ = translator
    [line] = re.findall(r"^curl .*", (standalone_package("translator") / "README.md").read_text(), flags=re.M)
    done = subprocess.run(
        ["sh", "-c", line.replace(":8000", f":{service.port}")], capture_output=True, text=True, check=False
    )
    if done.returncode in (2, 127):
        pytest.skip("no curl, or one older than --json")
    assert list(json.loads(done.stdout)) == ["outputs"]


def test_container_classifies_texts_and_pairs(tmp_path):
    expected = smelt_says("classifier", lambda m: m.predict(LABELED))
    with container(standalone_package("classifier"), tmp_path) as (service, _, _):
        status, answers = service.predict(*LABELED)
        assert status == 200
        assert [answer["label"] for answer in answers] == [answer.label for answer in expected]
        for answer, reference in zip(answers, expected, strict=True):
            assert answer["probabilities"] == pytest.approx(dict(reference.probabilities), abs=1e-6)
        assert [service.predict(["a"] * n)[0] for n in (1, 3)] == [422, 422]


def test_container_returns_embeddings_and_generated_texts(tmp_path):
    vectors = smelt_says("embedder", lambda m: m.embed(TEXTS[:3]))
    with container(standalone_package("embedder"), tmp_path / "e") as (service, _, _):
        assert service.predict(*TEXTS[:3])[1] == [pytest.approx(v.tolist(), abs=1e-6) for v in vectors]
    texts = smelt_says("writer", lambda m: m.generate(TEXTS[:3], max_new_tokens=4))
    with container(standalone_package("writer"), tmp_path / "w") as (service, _, _):
        assert service.predict(*TEXTS[:3]) == (200, texts)


def picture(number, format, **more):
    stream = io.BytesIO()
    images.make_image(number, **more).save(stream, format)
    return stream.getvalue()


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_container_accepts_images_as_body_and_base64(family, tmp_path):
    sent = [picture(0, "PNG"), picture(1, "JPEG", size=(40, 20)), picture(2, "WEBP", mode="RGBA")]
    for image_index, data in enumerate(sent):
        (tmp_path / f"{image_index}.png").write_bytes(data)
    expected = smelt_says(family, lambda m: m.classify([tmp_path / f"{n}.png" for n in range(3)]))
    with container(standalone_package(family), tmp_path / "root") as (service, _, _):
        encoded = [base64.b64encode(data).decode() for data in sent]
        status, answers = service.predict(*encoded)
        bodies = [service.request("POST", "/predict", data, {"Content-Type": "image/png"}) for data in sent]
        assert [status, *(answer[0] for answer in bodies)] == [200] * 4
        single_answers = [json.loads(body)["outputs"][0] for _, _, body in bodies]
        for answer, other, reference in zip(answers, single_answers, expected, strict=True):
            assert answer["label"] == other["label"] == reference.label
            assert answer["probabilities"] == pytest.approx(dict(reference.probabilities), abs=1e-6)
        for wrong in (
            "no base64!",
            f"*{encoded[0]}",
            base64.b64encode(b"no image").decode(),
            encoded[0][:40],
            3,
        ):
            assert service.predict(encoded[0], wrong)[0] == 422
        assert service.request("POST", "/predict", sent[1][:-30], {"Content-Type": "image/jpeg"})[0] == 422
        assert service.request("POST", "/predict", b"a", {"Content-Type": "text/plain"})[0] == 415
