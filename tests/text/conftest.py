import pytest

from freehold.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint)
