"""The mask of the hidden width, against CoFi's equation, its norms, and the model that is really narrower."""

import json
import math

import causal
import every_family
import harness
import images
import pytest
import sentences
import seq2seq
import tiny
import torch
import transformers
import what_follows
from every_family import OF_TEXTS
from torch.nn import functional

from smelt.compress.distill.logits import Distill, DistillSettings
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.learned.masks import LearnedMasks
from smelt.compress.prune.learned.settings import MasksSettings
from smelt.compress.prune.width.scores import hidden_norms
from smelt.compress.share.layers import Share, ShareSettings
from smelt.compress.train.settings import left_by_training
from smelt.core.data import SIMILARITY, Columns
from smelt.core.errors import InputError
from smelt.core.rows.examples import read_split
from smelt.families.registry import FAMILIES
from smelt.families.walk import blocks_of, states_of
from smelt.runtime.models.checkpoint import load_model, save_model
from smelt.runtime.models.edits.narrow import width_of

ALL = ("heads", "ffn", "width")


def masks_of(source, **settings):
    model, edits = load_model(source)
    found = LearnedMasks(model, MasksSettings(**{"what": ALL} | settings), edits)
    torch.manual_seed(0)
    with torch.no_grad():
        for log_alpha in [*found.units.values(), *found.parts.values(), found.hidden.log_alpha]:
            log_alpha.copy_(torch.randn(len(log_alpha)) * 1.5)  # many between 0 and 1
    return found, model, edits


def of(family, **settings):
    return masks_of(every_family.of_layers(family, 2), **settings)


def open_at(masks, channels):
    """Let the mask be 1 at these channels, and 0 at all others, to the last bit."""
    with torch.no_grad():
        masks.hidden.log_alpha.fill_(-50.0)
        masks.hidden.log_alpha[channels] = 50.0


def cdf_qz(x, loga):
    """The reference code (CoFiPruning, models/l0_module.py), as it stands there."""
    xn = (x - -0.1) / (1.1 - -0.1)
    logits = math.log(xn) - math.log(1 - xn)
    return torch.sigmoid(logits * (2.0 / 3.0) - loga).clamp(min=1e-6, max=1 - 1e-6)


def test_the_expected_size_is_that_of_the_reference():
    """get_num_parameters_and_constraint_for_hidden of l0_module.py, on products without biases."""
    masks, model, _ = of("modernbert", parts=("attention", "ffn"))
    config = model.config
    by_kind = {"attention": [], "ffn": []}
    for number, masked in enumerate(masks.masked):
        alphas = masks.units[str(number)], masks.parts[str(number)]
        by_kind[masked.places[0].kind].append(alphas)
    (head_loga, headlayer_loga), (int_loga, intlayer_loga) = (
        (torch.stack([u for u, _ in found]), torch.cat([p for _, p in found])) for found in by_kind.values()
    )
    hidden_size = config.hidden_size
    params_per_head = hidden_size * hidden_size * 4 // config.num_attention_heads
    prunable_model_size = 2 * (hidden_size**2 * 4 + 3 * hidden_size * config.intermediate_size)

    num_parameters = 0
    hidden_score = 1 - cdf_qz(0, masks.hidden.log_alpha)
    all_head_score = (1 - cdf_qz(0, headlayer_loga)).view(-1, 1)
    head_score = (all_head_score * (1 - cdf_qz(0, head_loga))).reshape(-1)
    num_parameters += torch.sum(torch.outer(hidden_score, head_score)) * params_per_head / hidden_size
    intlayer_score = (1 - cdf_qz(0, intlayer_loga)).unsqueeze(-1)
    int_score = (intlayer_score * (1 - cdf_qz(0, int_loga))).reshape(-1)
    num_parameters += (
        torch.sum(torch.outer(hidden_score, int_score)) * 3
    )  # of the gate too, which BERT has not

    wanted = float(num_parameters.detach() / prunable_model_size)
    assert 0.1 < wanted < 0.6
    assert float(masks.expected().detach()) == pytest.approx(wanted, abs=1e-5)
    masks.expected().backward()
    assert float(masks.hidden.log_alpha.grad.abs().min()) > 0


def test_the_expected_size_by_hand():
    """BERT of 2 layers, width 32, 4 heads of 8, 64 neurons: 8 of 32 channels, 1 head and 16 neurons stay."""
    masks, _, _ = of("bert")
    head, neuron = 8 * 3 * (32 + 1) + 8 * 32, 32 + 1 + 32
    assert masks.whole == 2 * (4 * head + 64 * neuron)
    open_at(masks, range(0, 32, 4))
    with torch.no_grad():
        for number, masked in enumerate(masks.masked):
            masks.units[str(number)].fill_(-50.0)
            masks.units[str(number)][: 1 if masked.count == 4 else 16] = 50.0
    wanted = 8 / 32 * (head + 16 * neuron) / (4 * head + 64 * neuron)
    assert float(masks.expected().detach()) == pytest.approx(wanted, abs=1e-6)
    assert masks.left() == pytest.approx(wanted)


@pytest.mark.parametrize("what", [["width"], ["ffn", "width"]])
def test_parts_whose_units_have_no_masks_become_narrower_too(what):
    masks, model, _ = of("bert", what=what)
    products = [name for block in blocks_of(model) for part in block.parts for name in part.products]
    matrices = sum(model.get_submodule(name).weight.numel() for name in products)
    biases = sum(model.get_submodule(name).bias.numel() for name in products)
    added = 2 * 2 * 32  # biases of what parts add are no unit's
    assert masks.whole == matrices + biases - added
    open_at(masks, range(8))
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(50.0)
    assert float(masks.expected().detach()) == pytest.approx(8 / 32)
    assert masks.left() == pytest.approx(8 / 32)


def agrees(masks, model, edits, source, out, outputs):
    """Compare what a model computes with masks, stored while they are there, and when they have settled."""
    with masks._around():
        masked = outputs(model)
    near = {"rtol": 1e-4, "atol": 1e-4 * float(masked.abs().max())}
    assert not torch.allclose(outputs(model), masked, atol=1e-2 * float(masked.abs().max()))
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    said = list(edits)
    (out / "meanwhile").mkdir(parents=True)
    with masks.stored():
        torch.testing.assert_close(outputs(model), masked, **near)
        save_model(model, edits, out / "meanwhile", source)
    after = dict(model.named_parameters())
    assert all(after[name] is p and torch.equal(p, value) for name, (p, value) in before.items())
    assert edits == said
    with masks._around():
        assert torch.equal(outputs(model), masked)
    ctx = harness.context(out)
    masks.settle(ctx, "finetune")
    assert ctx.facts["masks"]["width_after"] == width_of(model) < ctx.facts["masks"]["width_before"]
    (out / "cut").mkdir()
    save_model(model, edits, out / "cut", source)
    for folder in ("meanwhile", "cut"):
        again, _ = load_model(out / folder)
        torch.testing.assert_close(outputs(again), masked, **near)
    return ctx


@pytest.mark.parametrize("family", sorted(OF_TEXTS))
def test_the_cut_computes_what_the_masks_did(family, tmp_path):
    masks, model, edits = of(family, parts=("attention", "ffn"))
    values = masks.hidden.values()
    assert int(((values > 0) & (values < 1)).sum()) > 4
    source = every_family.of_layers(family, 2)
    ctx = agrees(masks, model, edits, source, tmp_path / "out", harness.logits)
    assert any(edit["op"] == "skip" for edit in edits) or FAMILIES[family].kind == "seq2seq"
    assert ctx.facts["masks"]["width_after"] % 8 == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
def test_a_head_that_is_the_embedding_or_not(family, tied, tmp_path):
    if family == "t5":
        source = seq2seq.t5(tmp_path / "model", gated=not tied)
    else:
        source = causal.model(tmp_path / "model", family=family, tie_word_embeddings=tied)
    masks, model, edits = masks_of(source)
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert list(masks.hidden._tied()) == ([head] if tied else [])
    agrees(masks, model, edits, source, tmp_path / "out", harness.logits)


@pytest.mark.parametrize("divided", [False, True])
def test_patches_of_images_have_the_mask_too(divided, tmp_path):
    source = images.model(tmp_path / "model")
    if divided:
        thin = FactorizeSettings(method="tucker", ratio=0.5)
        shown = images.split(images.rows(tmp_path / "rows.jsonl"))
        source = harness.run(Factorize(), thin, source, tmp_path / "thin", images.TASK, shown).out
    masks, model, edits = masks_of(source)
    pixels = torch.randn(2, 3, *[model.config.image_size] * 2)

    def outputs(model):
        with torch.no_grad():
            return model(pixels).logits

    agrees(masks, model, edits, source, tmp_path / "out", outputs)


def test_pairs_and_shared_layers_have_it_once(tmp_path):
    source = every_family.of_layers("marian", 2)
    shared = every_family.run(Share(), ShareSettings(groups=1), source, "marian", tmp_path / "shared").out
    thin = every_family.run(
        Factorize(), FactorizeSettings(what="embeddings", rank=12), shared, "marian", tmp_path / "thin"
    ).out
    pairs = every_family.run(
        Factorize(), FactorizeSettings(aim="size", rank=6), thin, "marian", tmp_path / "pairs"
    ).out
    masks, model, edits = masks_of(pairs)
    assert model.model.encoder.layers[0].fc1 is model.model.encoder.layers[1].fc1
    agrees(masks, model, edits, pairs, tmp_path / "out", harness.logits)


class CoFiLayerNorm(torch.nn.LayerNorm):
    """The reference code (CoFiPruning, models/modeling_bert.py), as it stands there."""

    def forward(self, input, hidden_z=None):
        remaining_index = torch.where(~hidden_z.eq(0))[0]
        compressed_input = torch.index_select(input, dim=-1, index=remaining_index)
        compressed_weight = self.weight[remaining_index]
        compressed_bias = self.bias[remaining_index]
        normalized_shape = len(remaining_index)
        normed_input = functional.layer_norm(
            compressed_input, [normalized_shape], compressed_weight, compressed_bias, self.eps
        )
        output = input.clone()
        output[:, :, remaining_index] = normed_input
        return output


def rms_norm(module, hidden_states, hidden_z):
    """The reference code (LLM-Shearing, models/composer_llama.py), as it stands there."""
    remaining_index = torch.where(~hidden_z.eq(0))[0]
    compressed_input = torch.index_select(hidden_states, dim=-1, index=remaining_index)
    variance = compressed_input.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + module.variance_epsilon)
    output = module.weight * hidden_states
    return output.mul(hidden_z)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_norms_are_those_of_the_reference(family):
    masks, model, _ = of(family)
    norm = hidden_norms(model)[1]
    setattr(norm, "eps" if family == "bert" else "variance_epsilon", 0.1)  # so that it tells
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        masks.hidden.log_alpha.fill_(0.0)  # a third of a draw is 0
    model.train()
    with masks._around():
        model(torch.randint(5, 20, (2, 9)))
        hidden_z = masks.hidden._mask.detach()
        assert 0 < int(hidden_z.eq(0).sum()) < len(hidden_z)
        x = torch.randn(2, 9, len(hidden_z)) * hidden_z
        found = norm(x).detach()
    if family == "bert":
        reference = CoFiLayerNorm(len(hidden_z), norm.eps)
        reference.load_state_dict(norm.state_dict())
        wanted = reference(x, hidden_z).mul(hidden_z).detach()
    else:
        wanted = rms_norm(norm, x, hidden_z).detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian"])
def test_in_training_the_same_channels_are_closed_wherever_they_run(family):
    masks, model, _ = of(family)
    with torch.no_grad():
        masks.hidden.log_alpha.fill_(0.0)
    seen = []
    handles = [
        model.get_submodule(state.module).register_forward_hook(
            lambda m, given, result, state=state: seen.append(state.of(given, result).detach())
        )
        for state in states_of(model)
        if state.number
    ]
    model.train()
    ids = torch.randint(5, 20, (2, 9))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    closed = []
    with masks._around():
        for _ in range(2):
            seen.clear()
            model(ids, **more).logits.square().sum().backward()
            gone = [(state == 0).all(dim=0).all(dim=0) for state in seen]
            assert len(gone) == len(handles) > 1
            assert all(torch.equal(gone[0], other) for other in gone)
            closed.append(gone[0])
    for handle in handles:
        handle.remove()
    assert not torch.equal(*closed)
    assert 0 < int(closed[0].sum()) < masks.hidden.width
    assert float(masks.hidden.log_alpha.grad.abs().max()) > 0


def test_as_many_channels_stay_as_are_expected_to_in_eights():
    masks, _, _ = of("bert")
    open_at(masks, range(3, 16))  # 13, of which the nearest multiple is 16
    with torch.no_grad():
        masks.hidden.log_alpha[20:23] = -49.0
    assert masks.hidden.kept().tolist() == [*range(3, 16), 20, 21, 22]
    assert masks.hidden.values().tolist() == [float(3 <= at < 16) for at in range(32)]
    open_at(masks, [])
    assert len(masks.hidden.kept()) == 8
    open_at(masks, range(32))
    assert masks.hidden.kept().tolist() == list(range(32))


def test_a_config_that_can_says_the_width(tmp_path):
    masks, model, edits = of("llama", what=["width"])
    source = every_family.of_layers("llama", 2)
    masks.settle(harness.context(tmp_path), "finetune")
    save_model(model, edits, tmp_path, source)
    assert edits == []
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == width_of(model)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(harness.logits(plain), harness.logits(model))


def test_where_no_channel_goes_the_width_stays(tmp_path):
    masks, model, edits = of("bert", what=["width"])
    open_at(masks, range(32))
    before = harness.logits(model)
    ctx = harness.context(tmp_path)
    masks.settle(ctx, "finetune")
    assert edits == []
    assert torch.equal(harness.logits(model), before)
    assert (ctx.facts["masks"]["width_before"], ctx.facts["masks"]["width_after"]) == (32, 32)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    home = tmp_path_factory.mktemp("rows")
    return read_split(str(tiny.pairs(home / "rows.jsonl")), "translation", Columns(), home)


def test_training_reaches_the_budget_in_a_narrower_model(rows, tmp_path):
    source = tiny.marian(tmp_path / "model", num_layers=1)
    settings = FinetuneSettings(
        max_steps=120, batch_size=4, learning_rate=3e-3, precision="fp32", evals=4,
        masks={"what": ALL, "keep": 0.5, "warmup": 0.6, "learning_rate": 0.3, "round_to": 4},
    )  # fmt: skip
    ctx = harness.run(Finetune(), settings, source, tmp_path / "out", data=rows)
    facts = ctx.facts["masks"]
    assert facts["kept"] == pytest.approx(0.5, abs=0.06)
    assert not any("masks" in text for text in ctx.warnings)
    assert ctx.facts["training"]["kept_step"] >= 90
    model = harness.model_of(ctx)
    assert width_of(model) == facts["width_after"] < facts["width_before"] == 32
    again = FinetuneSettings(max_steps=1, batch_size=4, precision="fp32", evals=1)
    later = harness.run(Finetune(), again, ctx.out, tmp_path / "again", data=rows)
    told = {v["step"]: v["loss"] for v in ctx.facts["training"]["validations"]}
    kept = told[ctx.facts["training"]["kept_step"]]
    assert later.facts["training"]["validations"][0]["loss"] == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("name", ["hidden", "relations"])
def test_a_student_with_masks_learns_from_what_its_teacher_has_inside(name, rows, tmp_path):
    settings = DistillSettings(
        max_steps=4, batch_size=4, precision="fp32", evals=0, losses={"logits": 1, name: 1},
        masks={"what": ["width"], "learning_rate": 5, "warmup": 0.5},
    )  # fmt: skip
    source = every_family.of_layers("marian", 2)
    ctx = harness.run(Distill(), settings, source, tmp_path / "out", data=rows)
    assert ctx.facts["masks"]["width_after"] == width_of(harness.model_of(ctx)) < 32
    told = ctx.facts["training"]["train_losses"]
    assert {f"{name}.encoder_layers", "logits", "budget"} <= told.keys()


@pytest.mark.parametrize("family", ["bert", "marian", "gemma"])
def test_what_is_left_can_be_exported(family, tmp_path):
    masks, model, edits = of(family)
    source, out = every_family.of_layers(family, 2), tmp_path / "cut"
    masks.settle(harness.context(out), "finetune")
    save_model(model, edits, out, source)
    what_follows.graphs_agree(out, family, tmp_path / "graphs")


@pytest.mark.parametrize(("stage", "settings"), [(Finetune, FinetuneSettings), (Distill, DistillSettings)])
def test_the_vectors_of_an_embedder_keep_their_width(stage, settings, tmp_path):
    asked = settings.model_validate({"masks": {"what": ["width"]}})
    found = stage.check_rows(asked, SIMILARITY, {})
    assert [place for place, _ in found] == ["masks.what"]
    assert "narrower ones cannot be compared" in found[0][1]
    assert "Say what: [heads, ffn]." in found[0][1]
    assert stage.check_rows(settings.model_validate({"masks": {}}), SIMILARITY, {}) == []
    assert stage.check_rows(asked, "text-classification", {}) == []
    source = sentences.embedder(tmp_path / "model")
    home = tmp_path / "rows"
    home.mkdir()
    data = read_split(str(sentences.rows(home / "rows.jsonl")), SIMILARITY, Columns(), home)
    with pytest.raises(InputError, match=r"masks\.what: the vectors of a sentence embedder"):
        harness.run(stage(), asked, source, tmp_path / "out", SIMILARITY, data)


def test_layers_stay_alike_where_the_width_alone_goes():
    assert left_by_training(FinetuneSettings(masks={"what": ["width"]})) == {"training"}
    assert left_by_training(FinetuneSettings(masks={"what": ALL})) == {"training", "widths"}
