"""The expected result of a request, computed without scheduler and memory."""

from __future__ import annotations

import re

import numpy as np

from freehold.contract.step import NOT_SCORED
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.simulation.model import SimulatedGrammar, expected_embedding, expected_logprobs, expected_output


def expected_end(
    request: Request, vocab_size: int, eos_tokens: tuple[int, ...], limit: int
) -> tuple[list[int], Finish]:
    """Return output and finish of an undisturbed cold run; `limit` is the most tokens of prompt and output."""
    params = request.params
    room = limit - len(request.prompt)
    count = room if params.max_tokens is None else min(room, params.max_tokens)
    eos, is_bound = next(iter(eos_tokens), -1), params.constraint is not None
    tokens = expected_output(request, count, vocab_size, eos)
    text, searched, passed = b"", 0, 0
    for i, token in enumerate(tokens):
        text += b"<%d>" % token
        may_stop = i + 1 >= params.min_tokens
        hits = [(at, stop) for stop in params.stop if (at := text.find(stop.encode(), searched)) >= 0]
        if hits and may_stop:
            return tokens[: i + 1], Finish(FinishKind.STOP, min(hits)[1])
        found = next((one for one in params.stop_regex if re.search(one, text[passed:].decode())), None)
        if found is not None and may_stop:
            return tokens[: i + 1], Finish(FinishKind.STOP, found)
        if found is not None:
            passed = len(text)
        if hits:
            searched = len(text)  # this match came too early to count
        if may_stop and not params.ignore_eos and (token in params.stop_token_ids or token in eos_tokens):
            return tokens[: i + 1], Finish(FinishKind.STOP, token)
        if is_bound and token in eos_tokens:
            return tokens[: i + 1], Finish(FinishKind.STOP, token)
    return tokens, Finish(FinishKind.LENGTH)


def check_logprobs(request: Request) -> None:
    """Check that each token has its own log-probability, once and in order; of the prompt, those requested. Raise
    AssertionError."""
    params, tokens = request.params, np.concatenate([request.prompt, request.output])
    if params.logprobs is None:
        assert not request.logprobs
        assert not request.prompt_logprobs
        return
    expected = [
        (int(token), logprob)
        for token, logprob in zip(tokens, expected_logprobs(tokens, request.namespace, request.adapter), strict=True)
    ]
    got = [(one.token, one.logprob) for one in request.logprobs]
    assert got == expected[len(request.prompt) :], f"{request.id}: log-probabilities lost or shifted"
    if params.prompt_logprobs_start is not None:
        first = params.prompt_logprobs_start + 1
        scores = [(one.token, one.logprob) for one in request.prompt_logprobs]
        assert scores == expected[first : first + len(scores)], f"{request.id}: scores of the prompt lost or shifted"
        has_all = len(scores) == max(len(request.prompt) - first, 0)
        assert has_all or not request.output.size, f"{request.id}: {len(scores)} scores of the prompt"
        assert not has_all or request.scored_from == NOT_SCORED, f"{request.id}: is scored again"


def check_embedding(request: Request) -> None:
    """Check the embedding of a prompt that was computed. Raise AssertionError."""
    if request.params.pooling is not None and request.output.size:
        got, expected = request.embedding, expected_embedding(request)
        assert got == expected, f"{request.id}: the embedding is {got} instead of {expected}"
        assert request.pooled_from == NOT_SCORED, f"{request.id}: is embedded again"


def check_end(request: Request, vocab_size: int, eos_tokens: tuple[int, ...], limit: int) -> None:
    """Check that a finished request has the expected result, and that one ended early is correct up to there. Raise
    AssertionError."""
    tokens, finish = expected_end(request, vocab_size, eos_tokens, limit)
    check_logprobs(request)
    check_embedding(request)
    output, got = request.output.tolist(), request.finish
    assert got is not None
    if request.params.constraint is not None and request.grammar is None:
        assert not output, f"{request.id}: ran without its grammar"
    if isinstance(request.grammar, SimulatedGrammar):
        assert len(output) <= request.grammar.fails, f"{request.id}: went on although its grammar had failed"
    if got.is_complete:
        assert output == tokens, f"{request.id}: output {output} instead of {tokens}"
        assert (got.kind, got.matched) == (finish.kind, finish.matched), f"{request.id}: {got} instead of {finish}"
    else:
        assert output == tokens[: len(output)], f"{request.id}: output {output} does not begin {tokens}"
        assert len(output) < len(tokens), f"{request.id}: went on after it had finished"
