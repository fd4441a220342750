"""What a folder of a model says of its tokens, and which of its files is believed."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from freehold.text.loading import load_tokenizer

WORDS = {"a": 0, "<one>": 1, "<two>": 2, "<end>": 3}


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<one>", "<two>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("generation", [None, 1, [1, 2], 0])
@pytest.mark.parametrize("config", [None, 2, [2, 3]])
@pytest.mark.parametrize("named", [None, "<end>", {"content": "<end>"}])
def test_what_ends_a_text_is_what_the_nearest_file_says(folder, generation, config, named):
    files = {"generation_config": generation, "config": config}
    for name, eos in files.items():
        if eos is not None:
            (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    said = [one for one in (generation, config, named and 3) if one is not None]
    expected = [] if not said else said[0] if isinstance(said[0], list) else [said[0]]
    tokenizer = load_tokenizer(SimpleNamespace(path=folder))
    assert list(tokenizer.eos_tokens) == expected
    assert tokenizer.special == {1, 2, 3}


@pytest.mark.parametrize("in_config", [None, "of the config"])
@pytest.mark.parametrize("in_file", [None, "of the file"])
def test_a_template_in_a_file_of_its_own_comes_before_that_of_the_config(folder, in_file, in_config):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": in_config}))
    if in_file is not None:
        (folder / "chat_template.jinja").write_text(in_file)
    template = load_tokenizer(SimpleNamespace(path=folder)).chat_template
    assert (None if template is None else template.source) == (in_file or in_config)
