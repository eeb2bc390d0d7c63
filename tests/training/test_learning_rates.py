"""Learning rates that nobody said: by family, by width, by what trains."""

import pytest

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.training.settings import default_learning_rate
from tests.support import harness
from tests.support.models import tiny

SHORT = {"max_steps": 2, "batch_size": 4, "precision": "fp32", "num_evals": 0}


@pytest.fixture
def rows(tmp_path):
    return tiny.read_pairs(tmp_path)


@pytest.mark.parametrize(("config", "what", "rate"), [
    # as published, of models as wide as those that were published
    ({"model_type": "bert", "hidden_size": 768}, "weights", 5e-5),  # Devlin et al. 2019, A.3
    ({"model_type": "roberta", "hidden_size": 768}, "weights", 2e-5),  # Liu et al. 2019
    ({"model_type": "bart", "d_model": 1024}, "weights", 3e-5),  # fairseq, examples/bart
    ({"model_type": "t5", "d_model": 768}, "weights", 3e-4),  # transformers' page of T5
    ({"model_type": "llama", "hidden_size": 4096}, "weights", 2e-5),  # Touvron et al. 2023
    ({"model_type": "llama", "hidden_size": 4096}, "adapters", 2e-4),  # QLoRA of 7B
    # half as wide, twice as fast; not without end
    ({"model_type": "bert", "hidden_size": 384}, "weights", 1e-4),
    ({"model_type": "llama", "hidden_size": 8192}, "weights", 1e-5),
    ({"model_type": "t5", "d_model": 64}, "weights", 1e-3),
    ({"model_type": "t5", "d_model": 512}, "adapters", 4.5e-4),  # not slower than all weights
    ({"model_type": "marian", "d_model": 256}, "few bits", 4e-4),
    ({"model_type": "marian", "d_model": 256}, "fewer layers", 4e-4),
    ({"model_type": "resnet", "hidden_sizes": [8, 16]}, "weights", 5e-4),
    ({"model_type": "unheard-of", "hidden_size": 8}, "weights", 5e-5),
])  # fmt: skip
def test_default_rate_depends_on_family_width_and_trained_part(config, what, rate):
    assert default_learning_rate(config, what) == pytest.approx(rate)


def test_default_learning_rate_is_reported(tmp_path, rows):
    source = tiny.write_marian(
        tmp_path / "model"
    )  # 32 wide: 2e-5 of 512 is 3.2e-4, and ten times as much too much
    coded = harness.run_stage(Quantize(), QuantizeSettings(scheme="int2"), source, tmp_path / "codes")
    eight = harness.run_stage(
        Quantize(), QuantizeSettings(scheme="int8-groupwise"), source, tmp_path / "eight"
    )
    four = harness.run_stage(Quantize(), QuantizeSettings(scheme="int4"), source, tmp_path / "four")

    def rate(stage, settings, source, name):
        ctx = harness.run_stage(
            stage, settings, source, tmp_path / name, data=rows,
            ancestors={"model": tiny.as_artifact(tmp_path / "model")},
        )  # fmt: skip
        return ctx.details["training"]["learning_rate"]

    assert rate(Finetune(), FinetuneSettings(**SHORT), source, "whole") == pytest.approx(3.2e-4)
    assert rate(Finetune(), FinetuneSettings(**SHORT), eight.out, "whole-codes") == pytest.approx(3.2e-4)
    assert rate(Finetune(), FinetuneSettings(**SHORT), four.out, "four-codes") == pytest.approx(3.2e-4)
    assert rate(Finetune(), FinetuneSettings(**SHORT, learning_rate=7e-5), source, "said") == 7e-5
    assert rate(Finetune(), FinetuneSettings(**SHORT), coded.out, "few") == 1e-3
    # the matrix of 62 words, which four modules share, is a third of what has codes
    skip = ["*attn*", "*encoder.layers.*", "*decoder.layers.1.*"]
    tied = harness.run_stage(
        Quantize(), QuantizeSettings(scheme="int2", exclude=skip), source, tmp_path / "tied"
    )
    assert rate(Finetune(), FinetuneSettings(**SHORT), tied.out, "shared") == 1e-3
    adapters = FinetuneSettings(**SHORT, lora={"r": 2})
    assert rate(Finetune(), adapters, source, "adapters") == 4e-4
    trained = DistillSettings(**SHORT, student=str(tmp_path / "model"))
    assert rate(Distill(), trained, source, "trained") == pytest.approx(3.2e-4)
    student = DistillSettings(**SHORT, student={"decoder_layers": 1})
    assert rate(Distill(), student, source, "student") == 1e-3
    assert rate(Distill(), DistillSettings(**SHORT), source, "again") == pytest.approx(3.2e-4)
    same_depth = DistillSettings(**SHORT, student={"decoder_layers": 2})
    assert rate(Distill(), same_depth, source, "no layer is gone") == pytest.approx(3.2e-4)
    cut = harness.run_stage(
        DropLayers(), DropLayersSettings(decoder_layers=1, importance="first"), source, tmp_path / "cut"
    )
    assert rate(Distill(), DistillSettings(**SHORT), cut.out, "taught") == 1e-3
    assert rate(Finetune(), FinetuneSettings(**SHORT), cut.out, "tuned") == 1e-3
