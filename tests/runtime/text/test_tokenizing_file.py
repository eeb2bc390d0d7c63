"""What stands in tokenizing.json."""

import pytest
from refusals import refused

from smelt.core.errors import InputError
from smelt.runtime.text.tokenizing_file import FILE, read_tokenizing


@pytest.mark.parametrize("text", ["{", "[]", '{"reader": "magic"}', '{"reader": "tokenizers", "more": 1}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with refused("damaged-file", InputError) as caught:
        read_tokenizing(tmp_path)
    assert FILE in str(caught.value)
