"""The table of forms."""

import pytest
from refusals import refused

from smelt.core.errors import InputError
from smelt.export.package.registry import DEFAULT, FORMS, find_form


def test_forms_are_found_by_their_names():
    assert find_form(DEFAULT).name == DEFAULT
    assert all(name == form.name for name, form in FORMS.items())


def test_an_unknown_form_names_those_that_there_are():
    with refused("unknown-package-format", InputError) as caught:
        find_form("standalon")
    assert "'standalon'" in str(caught.value)
    assert "'standalone'" in str(caught.value)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_says_in_a_line_what_it_is(name):
    form = FORMS[name]
    assert 0 < len(f"  {max(FORMS, key=len)}  {form.summary}") <= 80
    assert not form.summary.endswith(".")
    assert form.takes.formats
