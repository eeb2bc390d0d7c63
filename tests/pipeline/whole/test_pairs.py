"""Two techniques one behind the other: each stage on each kind of family, each technique first and second.

The plan accepts a pair, or refuses it with a reason. An accepted pair runs as in a run, and both techniques
keep what they promise (tests/support/pairs/technique_checks.py). `make matrix` runs all pairs, and graphs of
a part of them.
"""

import pytest

from smelt.core.errors import DEFAULT_CODE
from smelt.core.messages import message_codes
from smelt.models.families.registry import FAMILIES
from smelt.pipeline.recipe.stages import all_stages
from tests.support.pairs import run_all_pairs
from tests.support.pairs.pair_cases import all_pairs, covering_pairs, impossible_pairs
from tests.support.pairs.pair_runner import PairRunner, plan_errors
from tests.support.pairs.paired_techniques import MODELS, TECHNIQUES, with_prerequisite

SMALL = "bert"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A bench for a model, made once; a cell comes after others of its model."""
    benches = {}

    def bench(model):
        if model not in benches:
            benches.clear()
            benches[model] = PairRunner(model, tmp_path_factory.mktemp(model))
        return benches[model]

    return bench


@pytest.mark.parametrize(("model", "first", "second"), covering_pairs())
def test_two_techniques_in_sequence_keep_their_properties(bench, model, first, second):
    bench(model).run(first, second)


def test_impossible_pairs_are_rejected_by_plan_only(bench):
    """Of every third pair, and the first of each technique, on one model; `make matrix` asks all of them."""
    impossible = sorted(set(impossible_pairs()))
    first_of = {pair[position]: pair for position in (0, 1) for pair in reversed(impossible)}
    for first, second in sorted({*impossible[::3], *first_of.values()}):
        errors = plan_errors(bench(SMALL), first, second)
        assert errors, (first, second)
        steps = tuple(f"stages[{index}]" for index in range(len(with_prerequisite(first, second))))
        assert any((error.setting or "").startswith(steps) for error in errors), errors
        assert DEFAULT_CODE not in message_codes(errors)
    possible = {(a, b) for model, a, b in all_pairs() if model == SMALL}
    for first, second in sorted(possible)[:: len(possible) // 20]:
        assert plan_errors(bench(SMALL), first, second) == []


def test_pairs_command_defaults_to_all_models_and_lists_known_ones(capsys):
    assert run_all_pairs.parse_arguments([]).models == list(MODELS)
    assert run_all_pairs.parse_arguments(["bert", "t5"]).models == ["bert", "t5"]
    with pytest.raises(SystemExit):
        run_all_pairs.parse_arguments(["brt"])
    assert all(name in capsys.readouterr().err for name in ("'brt'",))


def test_each_stage_and_family_has_entry():
    torch = {stage_name for stage_name, stage in all_stages().items() if stage.produces == "torch"}
    assert torch == {technique.stage for technique in TECHNIQUES.values()}
    assert set(FAMILIES) == {model.kind for model in MODELS.values()}


def test_lost_files_and_edits_are_detected(bench, monkeypatch):
    """A later stage that forgets what is next to the weights, or what a layer keeps, does not pass."""
    from smelt.models import checkpoint

    model = bench("marian")
    copy = checkpoint.copy_tokenizer

    def forget(src, out):
        copy(src, out)
        (out / checkpoint.SHORTLIST).unlink(missing_ok=True)

    model.run("shortlist")
    monkeypatch.setattr(checkpoint, "copy_tokenizer", forget)
    with pytest.raises(AssertionError) as excinfo:
        model.run("shortlist", "depth")
    assert "the shortlist is gone" in str(excinfo.value)
    monkeypatch.undo()
    model.run("sparsify")
    monkeypatch.setattr(checkpoint, "add_mask_edits", lambda model, edits: [])
    with pytest.raises(AssertionError) as excinfo:
        model.run("sparsify", "vocabulary")
    assert "zeros may be filled" in str(excinfo.value)
