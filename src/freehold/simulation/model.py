"""The model of the simulated engine: what it samples after a prefix, and what it writes into slots.

The identity of a prefix is a chained hash of its namespace and tokens. The token sampled after it is a function of the
identity, so outputs are known without running. Compiled, because the simulator spends most of its time here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from freehold.contract.adapter import Adapter
from freehold.contract.arrays import Float32, Float64, Int32
from freehold.lost_kernels import compile_what_is_lost
from freehold.scheduler.request import Request

UInt64 = npt.NDArray[np.uint64]
compile_what_is_lost()


def seed_of(namespace: str, adapter: Adapter | None = None) -> np.uint64:
    """Return the identity of the empty prefix."""
    scope = namespace if adapter is None else f"{namespace}\0{adapter.fingerprint}"
    return np.uint64(int.from_bytes(hashlib.blake2b(scope.encode(), digest_size=8).digest(), "little"))


@njit(cache=True)
def mix(state, token):
    """Return the identity of a prefix one token longer (a multiply-xorshift hash)."""
    z = (state ^ (np.uint64(token) + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(29))


@njit(cache=True)
def next_token(identity, vocab_size):
    return np.int32((identity >> np.uint64(20)) % np.uint64(vocab_size))


# The form that binds a sequence's output, uint64 each: a seed (0: unbound); the output length from which only EOS is
# legal; the output length at which the grammar fails; prompt tokens; and a digest of the output so far.
SEED, END, FAILS, PROMPT, DIGEST = range(5)


@njit(cache=True)
def bound_token(identity, form, count, eos, vocab_size):
    """Return the next token of a sequence with `count` tokens of output, among those its form allows. They depend on
    the whole output so far."""
    token = next_token(identity, vocab_size)
    if form[SEED] == 0:
        return token
    if np.uint64(count) >= form[END]:
        return np.int32(eos)
    while token == eos or mix(form[DIGEST] ^ form[SEED], token) % np.uint64(3) == 0:
        token = np.int32((token + 1) % vocab_size)
    return token


@njit(cache=True)
def digest(form, tokens):
    """Add output to the digest."""
    for token in tokens:
        form[DIGEST] = mix(form[DIGEST], token)


def logprob_of(identity: np.uint64) -> float:
    """Return the log-probability that the model reports for the last token of a prefix."""
    return -(int(identity) >> 33) / 2.0**31


def pooled(identities: UInt64) -> Float64:
    """Return the exact sum of the final hidden states after these prefixes [n]: float64 [1]."""
    return (identities >> np.uint64(44)).astype(np.float64).sum(keepdims=True)


@njit(cache=True)
def extend_identities(identities, tokens, start, end, seed):
    """Fill identities[start:end] of a sequence's prefixes."""
    state = identities[start - 1] if start else seed
    for i in range(start, end):
        state = mix(state, tokens[i])
        identities[i] = state


@njit(cache=True)
def continue_cold(tokens, count, vocab_size, seed, form, eos):
    """Return `count` tokens that a cold run samples after `tokens`."""
    state = seed
    for token in tokens:
        state = mix(state, token)
    out = np.empty(count, np.int32)
    for i in range(count):
        out[i] = bound_token(state, form, i, eos, vocab_size)
        digest(form, out[i : i + 1])
        state = mix(state, out[i])
    return out


@njit(cache=True)
def slot_content(identity, weights):
    """Return the content of a slot: the prefix and the weights that wrote it. Never 0, which is poison."""
    return mix(identity, weights) | np.uint64(1)


STATE = -1  # in place of a lookback: the group has one state per page

# Verdicts on a step.
OK, WRONG_KV, NO_PAGE, WRONG_INPUT, WRONG_START = range(5)


class Slots(NamedTuple):
    """The contents of slots, uint64 [groups, slots], and each group's lookback, int64 [groups] (0: everything; STATE:
    it has states)."""

    content: Any
    lookbacks: Any
    page_size: int


class Prefix(NamedTuple):
    """One sequence: its pages, int32 [groups, columns]; its tokens, the identity of each prefix, the weights that wrote
    each position; its form."""

    pages: Any
    tokens: Any
    identities: Any
    written_by: Any
    form: Any


class Sequences(NamedTuple):
    """All rows: the fields of `Prefix`; the number of known tokens and its limit; the drafts of the newest step;
    whether a step with the sequence has failed."""

    tables: Any  # int32 [groups, rows, columns]
    tokens: Any
    identities: Any
    written_by: Any
    forms: Any
    length: Any
    max_length: Any
    last_drafts: Any
    broken: Any


class Rules(NamedTuple):
    """How tokens are sampled. `rate` percent of drafts are right."""

    weights: int
    vocab_size: int
    rate: int
    eos: int


class Answers(NamedTuple):
    """The results of a step: tokens of all sequences, one after another, and the rest by sequence."""

    tokens: Any
    counts: Any
    written: Any
    proposed: Any
    refused: Any


@njit(cache=True)
def compute(slots, prefix, weights, start, end):
    """Check, in every group of tokens, that the positions below `start` within a sequence's lookback hold its own
    prefix. Then write start .. end. Return (verdict, position, group)."""
    size = slots.page_size
    prefix.written_by[start:end] = weights
    for group, lookback in enumerate(slots.lookbacks):
        if lookback == STATE:
            continue
        first = max(start - lookback, 0) if lookback else 0
        for position in range(first, end):
            page = prefix.pages[group, position // size]
            if page == 0:
                return NO_PAGE, position, group
            slot = page * size + position % size
            content = slot_content(prefix.identities[position], prefix.written_by[position])
            if position >= start:
                slots.content[group, slot] = content
            elif slots.content[group, slot] != content:
                return WRONG_KV, position, group
    return OK, 0, 0


@njit(cache=True)
def read_states(slots, prefix, start):
    """Check that the state from which a sequence resumes at `start` is that of its own prefix. A state is in the first
    slot of its page. Return (verdict, position, group)."""
    size, last = slots.page_size, start - 1
    for group, lookback in enumerate(slots.lookbacks):
        if lookback == STATE and start:
            page = prefix.pages[group, last // size]
            if page == 0:
                return NO_PAGE, last, group
            if slots.content[group, page * size] != slot_content(prefix.identities[last], prefix.written_by[last]):
                return WRONG_KV, last, group
    return OK, 0, 0


@njit(cache=True)
def write_states(slots, prefix, start, written):
    """Write the state after `written` tokens to the column of the last one. Write the final state of every other column
    that the step passed, if it has a page. Return (verdict, position, group)."""
    size = slots.page_size
    for group, lookback in enumerate(slots.lookbacks):
        if lookback != STATE or written <= start:
            continue
        for column in range(start // size, (written - 1) // size + 1):
            last = min((column + 1) * size, written) - 1
            page = prefix.pages[group, column]
            if page:
                slots.content[group, page * size] = slot_content(prefix.identities[last], prefix.written_by[last])
            elif last == written - 1:
                return NO_PAGE, last, group
    return OK, 0, 0


@njit(cache=True)
def verify(slots, prefix, rules, length, drafts):
    """Sample a token after `length` known ones, and one more for each correct draft. Every draft writes KV, correct or
    not, and no state. Return (tokens sampled, verdict, position, group)."""
    identities, form = prefix.identities, prefix.form
    count, right = 0, True
    while right and count <= drafts:
        identity = identities[length - 1]
        output = length - np.int64(form[PROMPT])
        if count and form[SEED] and np.uint64(output) >= form[FAILS]:
            break  # the next step detects it
        token = bound_token(identity, form, output, rules.eos, rules.vocab_size)
        right = (identity >> np.uint64(7)) % np.uint64(100) < np.uint64(rules.rate)
        prefix.tokens[length] = token
        digest(form, prefix.tokens[length : length + 1])
        identities[length] = mix(identity, token)
        length += 1
        count += 1
        if right and count <= drafts:
            verdict, position, group = compute(slots, prefix, rules.weights, length - 1, length)
            if verdict != OK:
                return count, verdict, position, group
    rejected = drafts - count + 1
    if rejected > 0:
        first = length - 1
        true = identities[first : first + rejected].copy()
        identities[first : first + rejected] = 1
        verdict, position, group = compute(slots, prefix, rules.weights, first, first + rejected)
        identities[first : first + rejected] = true
        if verdict != OK:
            return count, verdict, position, group
    return count, OK, 0, 0


@njit(cache=True)
def use_pages(number, completed, rows, starts, ends, tables, page_size, used_by_step, used_by_row):
    """Record which pages a step will touch, before it runs. A page it writes must not be in use by an incomplete step
    of another sequence. Return (page or 0, group, the other step)."""
    for group in range(len(tables)):
        for i in range(len(rows)):
            row, start = rows[i], starts[i]
            first = start // page_size
            for column in range((ends[i] + page_size - 1) // page_size):
                page = tables[group, row, column]
                if page == 0:
                    continue
                other = used_by_step[group, page]
                mine = used_by_row[group, page] == row
                if column >= first and other > completed and not mine:
                    return page, group, other
                used_by_row[group, page] = row if mine or other <= completed else -1
                used_by_step[group, page] = number
    return 0, 0, 0


@njit(cache=True)
def run_step(planned, slots, sequences, rules, answers):
    """Run all sequences of a step. Return (verdict, row, position, group)."""
    emitted = 0
    for i in range(len(planned.rows)):
        row, start, count = planned.rows[i], planned.starts[i], planned.counts[i]
        if sequences.broken[row]:
            answers.counts[i] = planned.samples[i]
            answers.written[i] = start + count
            emitted += planned.samples[i]
            continue
        length, most = sequences.length[row], sequences.max_length[row]
        if planned.decodes[i]:
            # The planned start is an upper bound of the real one.
            if length > most or start < min(length, most - 1) - 1:
                return WRONG_START, row, start, 0
            start = length - 1
            if length >= most:
                if sequences.last_drafts[row] == 0:
                    return WRONG_START, row, start, 0  # it was certain to be full at planning
                answers.written[i] = start
                continue
        elif start + count > length:
            return WRONG_INPUT, row, start, 0
        verdict, position, group = run_sequence(planned, slots, sequences, rules, answers, i, start, emitted)
        if verdict != OK:
            return verdict, row, position, group
        emitted += answers.counts[i]
    return OK, 0, emitted, 0


@njit(cache=True)
def run_sequence(planned, slots, sequences, rules, answers, i, start, emitted):
    """Run sequence `i` of a step, from `start` on. Its tokens follow the `emitted` ones of others. Return (verdict,
    position, group)."""
    row, end = planned.rows[i], start + planned.counts[i]
    length, most, form = sequences.length[row], sequences.max_length[row], sequences.forms[row]
    prefix = Prefix(
        sequences.tables[:, row], sequences.tokens[row], sequences.identities[row], sequences.written_by[row], form
    )
    verdict, position, group = read_states(slots, prefix, start)
    if verdict == OK:
        verdict, position, group = compute(slots, prefix, rules.weights, start, end)
    if verdict != OK:
        return verdict, position, group
    answers.written[i] = end
    if planned.samples[i] and form[SEED] and np.uint64(length - np.int64(form[PROMPT])) >= form[FAILS]:
        answers.refused[i] = True
        sequences.max_length[row], sequences.last_drafts[row] = length, 1  # steps in flight find it full
    elif planned.samples[i]:
        ahead = max(min(planned.drafts[i], most - length - 1), 0)
        if prefix.identities[length - 1] % np.uint64(4) == 0:
            ahead //= 2  # sometimes a proposer finds fewer
        new, verdict, position, group = verify(slots, prefix, rules, length, ahead)
        if verdict != OK:
            return verdict, position, group
        answers.tokens[emitted : emitted + new] = prefix.tokens[length : length + new]
        sequences.length[row] = length + new
        sequences.last_drafts[row] = planned.drafts[i]
        answers.counts[i], answers.proposed[i] = new, ahead
        answers.written[i] += new - 1
    return write_states(slots, prefix, start, answers.written[i])


def expected_logprobs(tokens: Int32, namespace: str = "", adapter: Adapter | None = None) -> list[float]:
    """Return what a cold run reports for each of `tokens` [n], which are prompt or output."""
    return [logprob_of(identity) for identity in _identities(tokens, namespace, adapter)]


def expected_embedding(request: Request) -> Float32:
    """Return the embedding of a prompt in a cold run."""
    identities = _identities(request.prompt, request.namespace, request.adapter)
    last = identities if request.params.pooling == "mean" else identities[-1:]
    return (pooled(last) / len(last)).astype(np.float32)


def _identities(tokens: Int32, namespace: str, adapter: Adapter | None) -> UInt64:
    """Return the identity of each prefix of `tokens` [n], uint64 [n]."""
    identities = np.zeros(len(tokens), np.uint64)
    extend_identities(identities, np.asarray(tokens, np.int32), 0, len(tokens), seed_of(namespace, adapter))
    return identities


@dataclass(frozen=True)
class SimulatedGrammar:
    """A simulated grammar. The legal tokens depend on `seed` and on the whole output so far; after `end` tokens only
    EOS is legal. After `fails` tokens it cannot continue."""

    seed: int
    end: int
    fails: int = 1 << 40

    def form(self, prompt_length: int) -> UInt64:
        """Return the form in the engine's layout."""
        return np.array([self.seed, self.end, self.fails, prompt_length, 0], np.uint64)


FREE: UInt64 = np.zeros(5, np.uint64)


def expected_output(request: Request, count: int, vocab_size: int, eos: int = -1) -> list[int]:
    """Return a cold run's output for a request."""
    prompt, grammar = np.asarray(request.prompt, np.int32), request.grammar
    form = grammar.form(len(prompt)) if isinstance(grammar, SimulatedGrammar) else FREE.copy()
    return continue_cold(prompt, count, vocab_size, seed_of(request.namespace, request.adapter), form, eos).tolist()
