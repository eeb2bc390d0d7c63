"""Two techniques one behind the other: each stage on each family, each technique once first and once second.

The plan takes a pair, or says why not; a pair that it takes is done as a run does it, and both techniques
keep what they promise (tests/support/pairs/promises.py). All pairs, and graphs of a part: `make matrix`.
"""

import every_pair
import pytest
from bench import Bench, refused
from cells import every_cell, few_cells, refused_pairs
from paired_techniques import MODELS, TECHNIQUES, chain

from smelt.core.errors import UNNAMED
from smelt.core.messages import codes
from smelt.families.registry import FAMILIES
from smelt.recipe.stage_table import stages
from smelt.runtime.schemes.registry import SCHEMES

SMALL = "bert"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A bench for a model, made once; a cell comes after others of its model."""
    made = {}

    def bench(model):
        if model not in made:
            made.clear()
            made[model] = Bench(model, tmp_path_factory.mktemp(model))
        return made[model]

    return bench


@pytest.mark.parametrize(("model", "first", "second"), few_cells())
def test_two_techniques_follow_each_other_and_both_keep_what_they_promise(bench, model, first, second):
    bench(model).do(first, second)


def test_what_the_plan_refuses_it_refuses_in_words_and_nothing_else(bench):
    """Of all pairs on one model; `make matrix` asks it of all models."""
    never = set(refused_pairs())
    for first, second in sorted(never):
        found = refused(bench(SMALL), first, second)
        assert found, (first, second)
        steps = tuple(f"stages[{place}]" for place in range(len(chain(first, second))))
        assert any((one.setting or "").startswith(steps) for one in found), found
        assert UNNAMED not in codes(found)
    taken = {(a, b) for model, a, b in every_cell() if model == SMALL}
    for first, second in sorted(taken)[:: len(taken) // 20]:
        assert refused(bench(SMALL), first, second) == []


def test_the_command_takes_all_models_where_none_is_named_and_names_those_that_it_knows(capsys):
    assert every_pair.parsed([]).models == list(MODELS)
    assert every_pair.parsed(["bert", "t5"]).models == ["bert", "t5"]
    with pytest.raises(SystemExit):
        every_pair.parsed(["brt"])
    assert all(name in capsys.readouterr().err for name in ("'brt'",))


def test_each_stage_each_family_and_each_scheme_has_its_line():
    torch = {word for word, stage in stages().items() if stage.produces == "torch"}
    assert torch == {technique.word for technique in TECHNIQUES.values()}
    assert set(FAMILIES) == {model.kind for model in MODELS.values()}
    assert set(SCHEMES) == {t.settings["scheme"] for t in TECHNIQUES.values() if "scheme" in t.settings}


def test_what_is_lost_on_the_way_is_seen(bench, monkeypatch):
    """A later stage that forgets what lies beside the weights, or what a layer keeps, does not pass."""
    from smelt.runtime.models import checkpoint

    model = bench("marian")
    copy = checkpoint.copy_tokenizer

    def forget(src, out):
        copy(src, out)
        (out / checkpoint.SHORTLIST).unlink(missing_ok=True)

    model.do("shortlist")
    monkeypatch.setattr(checkpoint, "copy_tokenizer", forget)
    with pytest.raises(AssertionError) as caught:
        model.do("shortlist", "depth")
    assert "the shortlist is gone" in str(caught.value)
    monkeypatch.undo()
    model.do("sparsify")
    monkeypatch.setattr(checkpoint, "with_masks", lambda model, edits: [])
    with pytest.raises(AssertionError) as caught:
        model.do("sparsify", "vocabulary")
    assert "zeros may be filled" in str(caught.value)
