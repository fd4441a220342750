"""The model of the simulated engine: what it samples after a prefix, and what it writes into slots.

The identity of a prefix is a chained hash of its namespace and tokens. The token sampled after it is a
function of the identity, so outputs are known without running. Compiled, because the simulator spends its
time here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from freehold.adapter import Adapter
from freehold.arrays import Int32
from freehold.scheduler.request import Request

UInt64 = npt.NDArray[np.uint64]


def seed_of(namespace: str, adapter: Adapter | None = None) -> np.uint64:
    """The identity of the empty prefix."""
    scope = namespace if adapter is None else f"{namespace}\0{adapter.fingerprint}"
    return np.uint64(int.from_bytes(hashlib.blake2b(scope.encode(), digest_size=8).digest(), "little"))


@njit(cache=True)
def mix(state, token):
    """The identity of a prefix, one token longer (a multiply-xorshift hash)."""
    z = (state ^ (np.uint64(token) + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(29))


@njit(cache=True)
def next_token(identity, vocab_size):
    return np.int32((identity >> np.uint64(20)) % np.uint64(vocab_size))


# What binds a sequence's output, uint64 each: a seed (0: nothing does), after how many tokens only the one that ends
# a text is legal, after how many the grammar fails, tokens of prompt, and a digest of the output so far.
SEED, END, FAILS, PROMPT, DIGEST = range(5)


@njit(cache=True)
def bound_token(identity, form, count, eos, vocab_size):
    """The next token of a sequence with `count` tokens of output: of those that its form allows, which depend on the
    whole output so far."""
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
    """Take note of output."""
    for token in tokens:
        form[DIGEST] = mix(form[DIGEST], token)


def logprob_of(identity: np.uint64) -> float:
    """The log-probability that the model reports of the last token of a prefix."""
    return -(int(identity) >> 33) / 2.0**31


@njit(cache=True)
def extend_identities(identities, tokens, start, end, seed):
    """Fill identities[start:end] of a sequence's prefixes."""
    state = identities[start - 1] if start else seed
    for i in range(start, end):
        state = mix(state, tokens[i])
        identities[i] = state


@njit(cache=True)
def continue_cold(tokens, count, vocab_size, seed, form, eos):
    """`count` tokens that a cold run samples after `tokens`."""
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
    """What a slot holds: the prefix that wrote it, and the weights that did. Never 0, which is poison."""
    return mix(identity, weights) | np.uint64(1)


STATE = -1  # in place of a lookback: the group has one state a page

# What may be wrong with a step.
OK, WRONG_KV, NO_PAGE, WRONG_INPUT, WRONG_START = range(5)


@njit(cache=True)
def compute(slots, tables, lookbacks, page_size, identities, written_by, weights, start, end):
    """Check, in every group of tokens, that the positions below `start` of a sequence that the group looks back on hold
    its own prefix, then write start .. end. -> (verdict, position, group). `slots` uint64 [groups, slots], `tables`
    int32 [groups, columns], `lookbacks` int64 [groups] (0: everything; STATE: a group of states, which is left out),
    `written_by` int32 [positions]: the weights that wrote each."""
    written_by[start:end] = weights
    for group in range(len(slots)):
        if lookbacks[group] == STATE:
            continue
        first = max(start - lookbacks[group], 0) if lookbacks[group] else 0
        for position in range(first, end):
            page = tables[group, position // page_size]
            if page == 0:
                return NO_PAGE, position, group
            slot = page * page_size + position % page_size
            content = slot_content(identities[position], written_by[position])
            if position >= start:
                slots[group, slot] = content
            elif slots[group, slot] != content:
                return WRONG_KV, position, group
    return OK, 0, 0


@njit(cache=True)
def read_states(slots, tables, lookbacks, page_size, identities, written_by, start):
    """Check that the state that a sequence goes on from at `start` is that of its own prefix. A state is in the first
    slot of its page. -> (verdict, position, group)"""
    for group in range(len(slots)):
        if lookbacks[group] == STATE and start:
            page = tables[group, (start - 1) // page_size]
            if page == 0:
                return NO_PAGE, start - 1, group
            if slots[group, page * page_size] != slot_content(identities[start - 1], written_by[start - 1]):
                return WRONG_KV, start - 1, group
    return OK, 0, 0


@njit(cache=True)
def write_states(slots, tables, lookbacks, page_size, identities, written_by, start, written):
    """Leave the state after `written` tokens in the column of the last of them, and in every column that the step has
    passed and that has a page the state at its end. -> (verdict, position, group)"""
    for group in range(len(slots)):
        if lookbacks[group] != STATE or written <= start:
            continue
        for column in range(start // page_size, (written - 1) // page_size + 1):
            last = min((column + 1) * page_size, written) - 1
            page = tables[group, column]
            if page:
                slots[group, page * page_size] = slot_content(identities[last], written_by[last])
            elif last == written - 1:
                return NO_PAGE, last, group
    return OK, 0, 0


@njit(cache=True)
def verify(
    slots, tables, lookbacks, page_size, tokens, identities, written_by, weights, length, drafts, vocab_size, rate,
    form, eos,
):  # fmt: skip
    """Sample a token after `length` known ones, and one more for each right draft, `rate` percent of them.
    Every draft writes KV, right or wrong, and no state. -> (tokens sampled, verdict, position, group)"""
    count, right = 0, True
    while right and count <= drafts:
        identity = identities[length - 1]
        output = length - np.int64(form[PROMPT])
        if count and form[SEED] and np.uint64(output) >= form[FAILS]:
            break  # the next step finds out
        token = bound_token(identity, form, output, eos, vocab_size)
        right = (identity >> np.uint64(7)) % np.uint64(100) < np.uint64(rate)
        tokens[length] = token
        digest(form, tokens[length : length + 1])
        identities[length] = mix(identity, token)
        length += 1
        count += 1
        if right and count <= drafts:
            verdict, position, group = compute(
                slots, tables, lookbacks, page_size, identities, written_by, weights, length - 1, length
            )
            if verdict != OK:
                return count, verdict, position, group
    rejected = drafts - count + 1
    if rejected > 0:
        first = length - 1
        true = identities[first : first + rejected].copy()
        identities[first : first + rejected] = 1
        verdict, position, group = compute(
            slots, tables, lookbacks, page_size, identities, written_by, weights, first, first + rejected
        )
        identities[first : first + rejected] = true
        if verdict != OK:
            return count, verdict, position, group
    return count, OK, 0, 0


@njit(cache=True)
def use_pages(number, completed, rows, starts, ends, tables, page_size, used_by_step, used_by_row):
    """Note which pages a step will touch, before it runs. A page that it writes must not be in use by a step
    of another sequence that has not completed. -> (page or 0, group, the other step)"""
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
def run_step(
    rows, starts, counts, samples, drafts, decodes, broken, slots, tables, lookbacks, page_size, tokens, identities,
    written_by, weights, length, max_length, last_drafts, vocab_size, rate, forms, eos, out_tokens, out_counts,
    out_written, out_proposed, out_refused,
):  # fmt: skip
    """All sequences of a step -> (verdict, row, position, group); results in the arrays `out_*`."""
    emitted = 0
    for i in range(len(rows)):
        row, start, count = rows[i], starts[i], counts[i]
        if broken[row]:
            out_counts[i] = samples[i]
            out_written[i] = start + count
            emitted += samples[i]
            continue
        if decodes[i]:
            # The planned start is the highest that the real one can be.
            if length[row] > max_length[row] or start < min(length[row], max_length[row] - 1) - 1:
                return WRONG_START, row, start, 0
            start = length[row] - 1
            if length[row] >= max_length[row]:
                if last_drafts[row] == 0:
                    return WRONG_START, row, start, 0  # it was certain to be full when this was planned
                out_written[i] = start
                continue
        elif start + count > length[row]:
            return WRONG_INPUT, row, start, 0
        verdict, position, group = read_states(
            slots, tables[:, row], lookbacks, page_size, identities[row], written_by[row], start
        )
        if verdict != OK:
            return verdict, row, position, group
        verdict, position, group = compute(
            slots, tables[:, row], lookbacks, page_size, identities[row], written_by[row], weights, start, start + count
        )
        if verdict != OK:
            return verdict, row, position, group
        out_written[i] = start + count
        form = forms[row]
        if samples[i] and form[SEED] and np.uint64(length[row] - np.int64(form[PROMPT])) >= form[FAILS]:
            out_refused[i] = True
            max_length[row], last_drafts[row] = length[row], 1  # steps in flight find it full
        elif samples[i]:
            ahead = max(min(drafts[i], max_length[row] - length[row] - 1), 0)
            if identities[row, length[row] - 1] % np.uint64(4) == 0:
                ahead //= 2  # sometimes one can't think of as many
            before = length[row]
            new, verdict, position, group = verify(
                slots, tables[:, row], lookbacks, page_size, tokens[row], identities[row], written_by[row], weights,
                before, ahead, vocab_size, rate, form, eos,
            )  # fmt: skip
            if verdict != OK:
                return verdict, row, position, group
            out_tokens[emitted : emitted + new] = tokens[row, before : before + new]
            emitted += new
            length[row] = before + new
            last_drafts[row] = drafts[i]
            out_counts[i], out_proposed[i] = new, ahead
            out_written[i] += new - 1
        verdict, position, group = write_states(
            slots, tables[:, row], lookbacks, page_size, identities[row], written_by[row], start, out_written[i]
        )
        if verdict != OK:
            return verdict, row, position, group
    return OK, 0, emitted, 0


def expected_logprobs(tokens: Int32, namespace: str = "", adapter: Adapter | None = None) -> list[float]:
    """What a cold run reports of each of `tokens` [n], which are prompt or output."""
    identities = np.zeros(len(tokens), np.uint64)
    extend_identities(identities, np.asarray(tokens, np.int32), 0, len(tokens), seed_of(namespace, adapter))
    return [logprob_of(identity) for identity in identities]


@dataclass(frozen=True)
class SimulatedGrammar:
    """What is legal depends on `seed` and on the whole output so far; after `end` tokens only that which ends a text.
    After `fails` tokens it can't be followed any further."""

    seed: int
    end: int
    fails: int = 1 << 40

    def form(self, prompt_length: int) -> UInt64:
        """As the engine keeps it."""
        return np.array([self.seed, self.end, self.fails, prompt_length, 0], np.uint64)


FREE: UInt64 = np.zeros(5, np.uint64)


def expected_output(request: Request, count: int, vocab_size: int, eos: int = -1) -> list[int]:
    """What a cold run of the simulated model gives for a request."""
    prompt, grammar = np.asarray(request.prompt, np.int32), request.grammar
    form = grammar.form(len(prompt)) if isinstance(grammar, SimulatedGrammar) else FREE.copy()
    return continue_cold(prompt, count, vocab_size, seed_of(request.namespace, request.adapter), form, eos).tolist()
