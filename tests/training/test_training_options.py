"""Optimizers by name, gradient checkpointing, early stopping and fp16."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.tasks.samples import EncodedSample, collate
from smelt.training.losses import label_objective
from smelt.training.settings import OPTIMIZERS
from smelt.training.trainer import run_training
from smelt.training.training_state import gradient_checkpointing, training_state
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import causal, seq2seq, tiny

PLAIN = {"precision": "fp32", "dropout": 0.0, "num_evals": 0, "lr_scheduler_type": "constant",
         "warmup_steps": 0, "max_grad_norm": 1e9, "weight_decay": 0.0, "learning_rate": 1e-2,
         "max_steps": 1}  # fmt: skip
ROWS = [EncodedSample(list(range(5, 5 + n)), None, [*range(9, 9 + n), 0]) for n in (3, 7, 12, 4)]


@pytest.mark.parametrize(
    ("name", "reference"),
    [("sgd", lambda p: torch.optim.SGD(p, lr=1e-2)),
     ("adagrad", lambda p: torch.optim.Adagrad(p, lr=1e-2)),
     ("adafactor", lambda p: Adafactor(p, lr=1e-2, scale_parameter=False, relative_step=False))],
)  # fmt: skip
def test_update_equals_named_optimizer(tmp_path, name, reference):
    folder = tiny.write_marian(tmp_path / "model")
    model, other = load_model(folder)[0], load_model(folder)[0]
    settings = FinetuneSettings(**PLAIN, optimizer=name)
    ctx = harness.make_context(tmp_path / "work" / "out", seed=5)
    run_training(model, ROWS, None, objective=label_objective(), settings=settings, ctx=ctx)
    other.set_attn_implementation("eager")
    trained = [p for n, p in other.named_parameters() if dict(model.named_parameters())[n].requires_grad]
    label_objective()(other, collate(ROWS, other.config)).backward()
    other.get_input_embeddings().weight.grad[other.config.pad_token_id] = 0  # the row is frozen
    reference(trained).step()
    parameters = dict(model.named_parameters())
    for key, reference_parameter in other.named_parameters():
        if reference_parameter.grad is not None and parameters[key].requires_grad:
            clear = reference_parameter.grad.abs() > 1e-5  # the gradient of a key's bias is rounding
            torch.testing.assert_close(
                parameters[key][clear], reference_parameter[clear], rtol=1e-4, atol=1e-6
            )


@pytest.mark.quick
def test_optimizers_are_transformers_names_and_unknown_ones_are_rejected():
    assert {str(name.value) for name in OptimizerNames} >= set(OPTIMIZERS)
    with raises_setting_codes("unknown-optimizer"):
        FinetuneSettings(optimizer="adamw")
    needed = FinetuneSettings(optimizer="adamw_bnb_8bit").required_packages()
    assert set(needed) == {"bitsandbytes"}


def saved_bytes(model, rows):
    """Return the gradients of one batch, and the bytes that the forward pass keeps for the backward pass."""
    saved_sizes = []
    parameters = {p.data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            saved_sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    model.train()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = label_objective()(model, collate(rows, model.config))
    total = sum(saved_sizes)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, total


@pytest.mark.parametrize("kind", ["marian", "t5", "llama", "gpt2"])
def test_gradient_checkpointing_saves_memory_with_same_gradients(tmp_path, kind):
    write = {"marian": tiny.write_marian, "t5": seq2seq.write_t5}.get(
        kind, lambda folder: causal.write_model(folder, kind)
    )
    folder = write(tmp_path / "model")
    rows = ROWS if kind in ("marian", "t5") else [EncodedSample(r.input_ids, None, None) for r in ROWS]
    model, other = load_model(folder)[0], load_model(folder)[0]
    cpu = torch.device("cpu")
    with training_state(model, 0.0, cpu):
        expected, full_bytes = saved_bytes(model, rows)
    with training_state(other, 0.0, cpu), gradient_checkpointing(other):
        gradients, checkpointed_bytes = saved_bytes(other, rows)
    assert checkpointed_bytes < 0.6 * full_bytes
    assert expected.keys() == gradients.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in other.modules())


def test_distillation_with_gradient_checkpointing_has_same_weights(tmp_path):
    """The teacher's losses read states inside of layers, which the backward pass computes a second time."""
    folder, state_dicts = tiny.write_marian(tmp_path / "m"), []
    for checkpointed in (False, True):
        settings = DistillSettings.model_validate(
            {"losses": {"hidden_states": 1.0, "attention": 1.0, "logits": 1.0}, "max_steps": 3,
             "batch_size": 4, "learning_rate": 1e-3, "precision": "fp32", "dropout": 0.2, "num_evals": 0,
             "student": {"decoder_layers": 1}, "gradient_checkpointing": checkpointed}
        )  # fmt: skip
        out = tmp_path / str(checkpointed) / "out"
        harness.run_stage(Distill(), settings, folder, out, data=tiny.read_pairs(tmp_path))
        state_dicts.append(load_model(out)[0].state_dict())
    for name, weight in state_dicts[0].items():
        torch.testing.assert_close(state_dicts[1][name], weight, rtol=1e-4, atol=1e-6)


def test_patience_stops_training_without_improvement(tmp_path):
    settings = FinetuneSettings(
        **(PLAIN | {"learning_rate": 3.0, "max_steps": 8, "num_evals": 4, "early_stopping_patience": 2})
    )
    folder, data = tiny.write_marian(tmp_path / "m"), tiny.read_pairs(tmp_path)
    ctx = harness.run_stage(Finetune(), settings, folder, tmp_path / "work" / "out", data=data)
    training = ctx.details["training"]
    assert training["kept_step"] == 0
    assert [validation["step"] for validation in training["validations"]] == [0, 2, 4]
    assert (training["steps"], training["stopped_early"]) == (4, True)


@pytest.mark.quick
def test_patience_without_evaluations_is_rejected():
    with raises_setting_codes("no-evaluation"):
        FinetuneSettings(early_stopping_patience=1, num_evals=0)


def test_fp16_requires_a_gpu(tmp_path):
    settings = FinetuneSettings(**(PLAIN | {"precision": "fp16"}))
    folder, data = tiny.write_marian(tmp_path / "m"), tiny.read_pairs(tmp_path)
    with raises_code("no-fp16"):
        harness.run_stage(Finetune(), settings, folder, tmp_path / "work" / "out", data=data)


def test_compiled_training_has_weights_of_eager_one_for_batches_of_any_length(tmp_path):
    """Compilation takes most of the time; batches of other lengths and sizes must not start it again."""
    from torch._dynamo.utils import counters

    folder = tiny.write_bert(tmp_path / "model")
    rows = [EncodedSample(list(range(5, 5 + n)), None, n % 2) for n in (3, 7, 12, 4, 9, 5, 6, 8, 11, 10)]
    # SGD: Adam's updates do not become small with gradients that are rounding only, as those of keys' biases
    options = PLAIN | {"max_steps": 4, "batch_size": 3, "optimizer": "sgd", "learning_rate": 0.1}
    weights = []
    for torch_compile in (False, True):
        model, _ = load_model(folder)
        ctx = harness.make_context(tmp_path / str(torch_compile) / "out", "text-classification", seed=5)
        settings = FinetuneSettings(**options, torch_compile=torch_compile)
        torch._dynamo.reset()
        counters.clear()
        run_training(model, rows, None, objective=label_objective(), settings=settings, ctx=ctx)
        weights.append(model.state_dict())
        assert bool(counters["stats"]["unique_graphs"]) == torch_compile
    assert counters["stats"]["unique_graphs"] <= 3
    assert model._compiled_call_impl is None
    start = load_model(folder)[0].state_dict()
    assert not all(weights[0][name].equal(value) for name, value in start.items())
    for name, eager in weights[0].items():
        torch.testing.assert_close(weights[1][name], eager, rtol=1e-4, atol=1e-6)


def test_compiled_distillation_compiles_both_models(tmp_path, monkeypatch):
    """Both call a compiled forward pass; the backend is torch's eager one, which is compiled in no time."""
    compiled, compile_module = [], torch.nn.Module.compile

    def compile_eagerly(module, **options):
        compiled.append(module)
        compile_module(module, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), "text-classification")
    data = {"train": Split("x", tuple(Example(f"red dogs {n}", label="LABEL_0") for n in range(4)))}
    weights = []
    for torch_compile in (False, True):
        out = tmp_path / str(torch_compile) / "out"
        ctx = harness.make_context(out, "text-classification", data=data, seed=1)
        ctx.ancestors["model"] = source
        settings = DistillSettings(**PLAIN | {"max_steps": 2}, torch_compile=torch_compile)
        Distill()(source, settings, ctx)
        weights.append(harness.load_output_model(ctx).state_dict())
    assert len({id(module) for module in compiled}) == 2
    for name, eager in weights[0].items():
        torch.testing.assert_close(weights[1][name], eager, rtol=1e-4, atol=1e-5)


def test_compilation_is_refused_with_layers_that_change_and_inner_states():
    for settings, other in (
        (FinetuneSettings, {"qat": {}}),
        (FinetuneSettings, {"sparsify": {}}),
        (DistillSettings, {"learned_masks": {}}),
        (DistillSettings, {"losses": {"hidden_states": 1.0}}),
    ):
        settings(**other)
        with raises_setting_codes("settings-conflict"):
            settings(**other, torch_compile=True)


@pytest.mark.parametrize("stage", [Finetune, Distill])
def test_compilation_is_refused_for_quantized_weights_that_are_trained(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)  # takes long
    data = {"train": Split("x", tuple(Example(f"red dogs {n}", label="LABEL_0") for n in range(4)))}
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), "text-classification")
    ctx = harness.make_context(tmp_path / "quantized" / "out", "text-classification")
    Quantize()(source, QuantizeSettings(), ctx)
    quantized = tiny.as_artifact(ctx.out, "text-classification")
    ctx = harness.make_context(tmp_path / "trained" / "out", "text-classification", data=data)
    ctx.ancestors["model"] = source
    with raises_code("settings-conflict") as refused:
        stage()(quantized, stage.settings_type(**PLAIN, torch_compile=True), ctx)
    assert refused.value.setting == "torch_compile"
