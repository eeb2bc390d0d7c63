"""The rig itself: where it cannot be made, the reason is told and nothing is left half made."""

import shutil
import sys
from pathlib import Path

import pytest
import tensorrt_rig


def made(base: Path) -> object:
    """Make the rig as if nobody had asked for it before."""
    return tensorrt_rig._make_rig.__wrapped__(base)


def is_off(error: BaseException) -> bool:
    """Whether the error names the variable that switches the rig off."""
    return "SMELT_TENSORRT_RIG" in str(error)


def test_rig_that_is_switched_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_TENSORRT_RIG", "off")
    with pytest.raises(tensorrt_rig.NoRigError, check=is_off):
        tensorrt_rig.environment()
    with pytest.raises(pytest.skip.Exception, check=is_off):
        tensorrt_rig.rig_environment()


def test_packages_that_cannot_be_fetched_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_rig, "PACKAGES", ("smelt-has-no-such-package==1", "nor-this-one==2"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    found = made(tmp_path)
    assert isinstance(found, tensorrt_rig.NoRigError)
    assert "pip cannot fetch smelt-has-no-such-package==1 and nor-this-one==2: ERROR: No matching" in str(
        found
    )
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_missing_compiler_is_the_reason_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = made(tmp_path)
    assert isinstance(found, tensorrt_rig.NoRigError)
    assert "there is no C compiler (cc)" in str(found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and cc")
def test_rig_is_put_together_from_the_packages_and_then_only_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(site: Path) -> None:
        (site / tensorrt_rig.LIBRARIES).mkdir(parents=True)
        for name in ("libtensorrt_rtx.so.1.7.1", "libtensorrt_onnxparser_rtx.so.1.7.1"):
            (site / tensorrt_rig.LIBRARIES / name).write_text(name)
        (site / "tensorrt_bindings").mkdir()

    monkeypatch.setattr(tensorrt_rig, "install", install)
    rig = made(tmp_path)
    assert isinstance(rig, Path)
    assert (rig / "libnvinfer.so.11").read_text() == "libtensorrt_rtx.so.1.7.1"
    assert (rig / "libnvonnxparser.so.11").read_text() == "libtensorrt_onnxparser_rtx.so.1.7.1"
    assert (rig / "libnvinfer_plugin.so.11").stat().st_size > 0
    assert (rig / "python" / "tensorrt_bindings").is_dir()
    monkeypatch.setattr(tensorrt_rig, "install", lambda site: pytest.fail("made twice"))
    assert made(tmp_path) == rig
