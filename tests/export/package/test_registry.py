"""The table of forms."""

import pytest

from smelt.api.package import PACKAGE_FORMATS, find_package_format
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_forms_are_found_by_their_names():
    assert all(name == form.name == find_package_format(name).name for name, form in PACKAGE_FORMATS.items())


def test_an_unknown_form_names_those_that_there_are():
    with raises_code("unknown-package-format", InputError) as caught:
        find_package_format("standalon")
    assert "'standalon'" in str(caught.value)
    assert "'standalone'" in str(caught.value)
