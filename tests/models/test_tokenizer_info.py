"""What stands in tokenizing.json."""

import pytest

from smelt.core.errors import InputError
from smelt.models.tokenizer import TOKENIZER_INFO_FILE, read_tokenizer_info
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("text", ["{", "[]", '{"reader": "magic"}', '{"reader": "tokenizers", "more": 1}'])
def test_damaged_file_is_rejected(tmp_path, text):
    (tmp_path / TOKENIZER_INFO_FILE).write_text(text)
    with raises_code("damaged-file", InputError) as caught:
        read_tokenizer_info(tmp_path)
    assert TOKENIZER_INFO_FILE in str(caught.value)
