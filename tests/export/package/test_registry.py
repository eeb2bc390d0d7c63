"""The table of forms."""

import pytest

from smelt.api.package import PACKAGE_FORMATS, find_package_format
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_formats_are_found_by_name():
    assert all(name == form.name == find_package_format(name).name for name, form in PACKAGE_FORMATS.items())


def test_unknown_format_error_lists_formats():
    with raises_code("unknown-package-format", InputError) as excinfo:
        find_package_format("standalon")
    assert "'standalon'" in str(excinfo.value)
    assert "'standalone'" in str(excinfo.value)
