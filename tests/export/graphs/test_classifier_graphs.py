"""DistilBERT and RoBERTa as graphs, whole and cut, against torch; BERT's own tests are next to this one."""

import numpy as np
import onnxruntime
import pytest

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.data.splits import Columns, Example, Split
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings, TensorrtSettings
from smelt.export.tensorrt.profiles import profile_ranges
from smelt.runtimes.predict_texts import class_logits
from smelt.runtimes.registry import open_folder, open_runner
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import classifiers, tiny

TASK = "text-classification"


def step(folder, name, stage, settings, source):
    out = folder / name
    split = read_split("data.jsonl", TASK, Columns(), folder)
    ctx = harness.make_context(out, TASK, data={"train": split}, ancestors={"model": source})
    stage()(source, settings, ctx)
    return tiny.as_artifact(out, TASK, **ctx.details), ctx


@pytest.fixture(scope="module", params=["distilbert", "roberta"])
def small(request, tmp_path_factory):
    """A pruned and factorized model: other head counts than the config says, and pairs of thin layers."""
    folder = tmp_path_factory.mktemp(request.param)
    classifiers.MAKERS[request.param](
        folder / "m", labels=3, id2label=dict(enumerate(classifiers.CLASS_NAMES))
    )
    classifiers.write_labeled_rows(folder / "data.jsonl", "single_label_classification", pairs=True)
    source = tiny.as_artifact(folder / "m", TASK)
    settings = PruneSettings(keep_ratio={"heads": 0.75, "ffn": 0.5}, importance="magnitude")
    pruned, _ = step(folder, "pruned", Prune, settings, source)
    thin, _ = step(
        folder,
        "thin",
        Factorize,
        FactorizeSettings(method="svd", optimize_for="size", rank=6, include=["*.0.*"]),
        pruned,
    )
    return folder, thin


def logits(runner):
    pairs = [Example(a, text_pair=b) for a, b in zip(tiny.SENTENCES, tiny.SENTENCES[::-1], strict=True)]
    return class_logits(runner, [*pairs, Example("she sings a song")], batch_size=4)


def test_graph_has_model_inputs_and_equal_outputs(small):
    folder, thin = small
    out, ctx = step(folder, "fp32", Onnx, OnnxSettings(), thin)
    session = onnxruntime.InferenceSession(out.path / "model.onnx")
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert ctx.details["graphs"]["model"]["operators"]["FusedMatMul"] % 2 == 0
    with open_runner(thin) as parent, open_folder(out.path, "onnx", "ort-cpu", 1) as runner:
        expected = logits(parent)
        assert np.abs(logits(runner) - expected).max() < 1e-4 * expected.std()
        longest = [Example(" ".join(tiny.SENTENCES * 2))]  # as many tokens as there are positions
        assert np.allclose(class_logits(runner, longest), class_logits(parent, longest), atol=1e-4)


def test_engine_profile_is_limited_by_position_table(small):
    """RoBERTa's table has 66 rows for 64 tokens; a longer profile would read beyond it without a word."""
    folder, thin = small
    text = " ".join(tiny.SENTENCES * 3)
    ctx = harness.make_context(folder, TASK, data={"train": Split("x", (Example(text, label=0),))})
    [ranges], limit = profile_ranges(thin.path, TensorrtSettings(), ctx)
    assert limit == ranges["input"].max == (64 if folder.name.startswith("roberta") else 32)
