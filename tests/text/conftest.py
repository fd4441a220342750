import pytest

from freehold.text.loading import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint)
