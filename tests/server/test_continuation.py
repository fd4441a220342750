"""How a chat goes on behind tokens that are there."""

import numpy as np
import pytest

from freehold.server.sessions.continuation import continuation
from freehold.text.loading import load_tokenizer

ANSWERED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nGood day<|im_end|>\n"
NEXT = "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint)


def tokens_of(tokenizer, text):
    return tokenizer.encode(text.removesuffix("\n"), False)


def test_what_is_new_follows_the_tokens(tokenizer):
    tokens = tokens_of(tokenizer, ANSWERED)
    assert continuation(tokenizer, tokens, 0, ANSWERED, ANSWERED + NEXT) == "\n" + NEXT


def test_an_answer_that_was_cut_is_ended_first(tokenizer):
    tokens = tokens_of(tokenizer, ANSWERED.removesuffix("<|im_end|>\n"))
    assert continuation(tokenizer, tokens, 0, ANSWERED, ANSWERED + NEXT) == "<|im_end|>\n" + NEXT


def test_only_the_last_turn_need_be_found(tokenizer):
    """What a session holds before it may have been written in another way."""
    turn = tokens_of(tokenizer, ANSWERED)
    tokens = np.concatenate([tokenizer.encode("of another kind", False), turn])
    begin = len(tokens) - len(turn)
    assert continuation(tokenizer, tokens, begin, "Before. " + ANSWERED, "Before. " + ANSWERED + NEXT) == "\n" + NEXT


@pytest.mark.parametrize("begin", [0, 3])
def test_nothing_follows_the_tokens_of_another_chat(tokenizer, begin):
    tokens = tokens_of(tokenizer, ANSWERED.replace("Hello", "Farewell"))
    assert continuation(tokenizer, tokens, begin, ANSWERED, ANSWERED + NEXT) is None


def test_a_template_that_rewrites_earlier_turns_starts_anew(tokenizer):
    tokens = tokens_of(tokenizer, ANSWERED)
    assert continuation(tokenizer, tokens, 0, ANSWERED, ANSWERED.replace("Good day", "...") + NEXT) is None
