"""Processing of step results: commit KV, append tokens, detect ends. One routine for every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from freehold.contract.arrays import Int64
from freehold.contract.errors import EngineFailed, InvalidParameter
from freehold.contract.step import Step, StepResult, TokenLogprobs
from freehold.contract.vocabulary import Vocabulary, find_stop
from freehold.memory import Memory
from freehold.scheduler.chunk_budget import ChunkBudget
from freehold.scheduler.faults import fault_of_one
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.scheduler.running import RunningTable
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.states import Event, RequestState


@dataclass
class StepOutput:
    """The output of an iteration: `tokens[i]` for `requests[i]`, then the requests that ended. `started` have their
    first token since admission."""

    requests: list[Request] = field(default_factory=list[Request])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    ended: list[Request] = field(default_factory=list[Request])
    started: list[Request] = field(default_factory=list[Request])

    def append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self.logprobs[len(self.tokens)] = logprobs
        self.requests.append(request)
        self.tokens.append(token)


class Results:
    """Processes the results of steps, in their order."""

    def __init__(
        self,
        memory: Memory,
        running: RunningTable,
        lifecycle: Lifecycle,
        vocabulary: Vocabulary,
        chunks: ChunkBudget,
        drafts: DraftBudget | None,
    ):
        self._memory = memory
        self._running = running
        self._lifecycle = lifecycle
        self._vocabulary = vocabulary
        self._chunks = chunks
        self._drafts = drafts
        self.token_count = 0  # sampled since startup
        self.drafted_count = 0
        self.accepted_count = 0
        self.refused_count = 0  # grammars that refused to continue

    def take(self, step: Step, result: StepResult, live: Int64, output: StepOutput) -> None:
        """Process a result. `live` indexes the rows of the step that still have their request."""
        if result.seconds:
            decoding = int(np.count_nonzero(step.counts == 1))
            self._chunks.time.learn(decoding, int(step.counts.sum()) - decoding, result.seconds)
        if result.refused:
            live = self._refuse(step, result.refused, live)
        running, rows, starts, drafts = self._running, step.rows, step.starts, step.drafts
        if len(live) < len(rows):
            rows, starts, drafts, result = rows[live], starts[live], drafts[live], result.only(live)
        counts, before = result.counts, running.length[rows]
        which, offset = _spread(counts)
        token_rows, at = rows[which], before[which] + offset
        running.tokens[token_rows, at] = result.tokens
        self.token_count += len(result.tokens)
        running.settle(rows, counts, drafts)
        self._memory.leases.commit(rows, result.written, running.scheduled[rows])
        fresh = (starts < running.prefill_end[rows]).nonzero()[0]
        if len(fresh):
            self._publish_prompts(rows[fresh], before[fresh])
            self._note_first_tokens(rows[fresh[counts[fresh] > 0]], output)
        self._learn(rows, result.proposed, counts)
        for i, scores in result.scores.items():
            running.request(int(rows[i])).prompt_logprobs += scores
        for i, pooled in result.pooled.items():
            running.request(int(rows[i])).pool(*pooled)
        self._deliver(token_rows, at + 1, result, output)

    def _refuse(self, step: Step, refused: Mapping[int, str], live: Int64) -> Int64:
        """End the requests whose grammar cannot continue: for them the step has failed. Return the rest of `live`."""
        for i in live[np.isin(live, list(refused))].tolist():
            self.refused_count += 1
            request = self._running.request(int(step.rows[i]))
            constraint = request.params.constraint
            assert constraint is not None
            error = InvalidParameter(constraint.field, f"too complex for this output: {refused[i]}")
            self._lifecycle.end(request, Finish(FinishKind.ERROR, error=error))
        return live[~np.isin(live, list(refused))]

    def fail(self, rows: Int64, error: BaseException) -> None:
        """End the requests of a step that did not complete. Nothing was committed."""
        for row in rows:
            request = self._running.request(int(row))
            message = f"the engine failed: {type(error).__name__}: {error}"
            self._lifecycle.end(request, Finish(FinishKind.ERROR, error=EngineFailed(message)))

    def _publish_prompts(self, rows: Int64, known: Int64) -> None:
        """Share each chunk as soon as it is written; decoded tokens are shared when the request ends."""
        for row, length in zip(rows.tolist(), known.tolist(), strict=True):
            request = self._running.request(row)
            assert request.lease is not None
            self._memory.publish(request.lease, self._running.tokens[row, :length], request.priority)

    def _learn(self, rows: Int64, proposed: Int64, counts: Int64) -> None:
        if self._drafts is None or not self._drafts.may_draft(rows):
            return
        tried = proposed > 0
        # The last token of a verification is the model's own.
        accepted = np.where(tried, counts - 1, 0)
        self._drafts.learn(rows, proposed, accepted)
        self.drafted_count += int(proposed.sum())
        self.accepted_count += int(accepted.sum())
        for i in np.flatnonzero(tried):
            request = self._running.request(int(rows[i]))
            request.drafted += int(proposed[i])
            request.accepted += int(accepted[i])

    def _note_first_tokens(self, rows: Int64, output: StepOutput) -> None:
        for row in rows:
            now, request = self._lifecycle.clock(), self._running.request(int(row))
            request.transition(Event.DECODED, now)
            request.first_token = request.first_token or now
            output.started.append(request)

    # -- tokens ---------------------------------------------------------------------------------------

    def _deliver(self, rows: Int64, length: Int64, result: StepResult, output: StepOutput) -> None:
        """Deliver tokens, up to the one that ends each request. `length` [tokens] is the sequence length including that
        token."""
        running, tokens = self._running, result.tokens
        eos = self._vocabulary.is_eos(tokens)
        notable = eos | (length >= running.watch_from[rows])
        requests = running.requests_of(rows)
        if not np.count_nonzero(notable):
            output.requests.extend(requests)
            output.tokens.extend(tokens.tolist())
            return
        may_stop = length >= running.min_length[rows]
        eos &= (may_stop & ~running.ignore_eos[rows]) | running.is_bound[rows]
        full = length >= running.max_length[rows]
        for i, request in enumerate(requests):
            if request.state is RequestState.ENDED:
                continue
            token, logprobs = int(tokens[i]), result.logprobs.get(i)
            output.append(request, token, logprobs)
            if notable[i]:
                finish = self._finish_of(request, token, logprobs, bool(may_stop[i]), bool(eos[i]), bool(full[i]))
                if finish is not None:
                    running.length[rows[i]] = length[i]
                    self._lifecycle.end(request, finish)

    def _finish_of(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, may_stop: bool, eos: bool, full: bool
    ) -> Finish | None:
        """Return what the token ends its request with, if it does. A fault here ends only this request."""
        try:
            return self._finish(request, token, logprobs, may_stop, eos, full)
        except Exception as error:
            return Finish(FinishKind.ERROR, error=fault_of_one(error))

    def _finish(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, may_stop: bool, eos: bool, full: bool
    ) -> Finish | None:
        """Apply precedence: a stop string beats a stop token, which beats the length limit."""
        finish = self._watch(request, token, may_stop, logprobs)
        if finish is None and eos:
            finish = Finish(FinishKind.STOP, token)
        if finish is None and full:
            finish = Finish(FinishKind.LENGTH)
        return finish

    def _watch(self, request: Request, token: int, may_stop: bool, logprobs: TokenLogprobs | None) -> Finish | None:
        """Match the request's own stops, and record its logprobs."""
        params = request.params
        piece = self._vocabulary.token_bytes[token] if token < self._vocabulary.size else b""
        if logprobs is not None:
            request.logprobs.append(logprobs)
        if params.stop:
            found, request.stop_tail = find_stop(request.stop_tail, piece, request.stop_bytes)
            if found is not None and may_stop:
                return Finish(FinishKind.STOP, params.stop[found])
            if found is not None:
                request.stop_tail = b""
        if request.stop_regexes is not None:
            matched = request.stop_regexes.add(piece, may_stop)
            if matched is not None:
                return Finish(FinishKind.STOP, matched[1])
        if token in params.stop_token_ids and may_stop and not params.ignore_eos:
            return Finish(FinishKind.STOP, token)
        return None


def _spread(counts: Int64) -> tuple[Int64 | slice, Int64 | int]:
    """Return the index of its count for each item, and its offset 0 .. count - 1 within that count."""
    if counts.max(initial=0) <= 1:
        everybody = np.count_nonzero(counts) == len(counts)
        return slice(None) if everybody else counts.nonzero()[0], 0
    ends = counts.cumsum()
    return np.arange(len(counts)).repeat(counts), np.arange(int(ends[-1])) - (ends - counts).repeat(counts)
