"""Whatever happens to a conversation, its next turn says what a cold run on the full history would."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from freehold import LLM, SamplingParams
from freehold.contract.errors import TurnRefused
from freehold.scheduler.request import FinishKind, Request
from freehold.server.sessions.conversation import Conversation

OPTIONS = [
    {"page_size": 16},
    {"page_size": 4, "speculative_algorithm": "ngram", "chunked_prefill_size": 16},
    {"page_size": 1, "disable_overlap_schedule": True},
    {"page_size": 64, "speculative_algorithm": "draft", "speculative_draft_layers": 2},
    {"page_size": 4, "num_pages": 48, "forward_retract_interval": 3},
]
tokens = st.lists(st.integers(100, 400), min_size=1, max_size=24)


class Turns(RuleBasedStateMachine):
    """`engines` and `cold` are set below: one engine for each set of options, kept between examples."""

    engines: ClassVar[list[LLM]] = []
    cold: ClassVar[LLM]

    @initialize(which=st.integers(0, len(OPTIONS) - 1))
    def start(self, which):
        self.llm = self.engines[which]
        self.llm.scheduler.memory.flush()
        self.conversations = [Conversation()]
        self.number = 0

    def begin(self, data, new, count):
        at = data.draw(st.integers(0, len(self.conversations) - 1))
        conversation = self.conversations[at]
        try:
            whole = conversation.begin(np.array(new, np.int32), capacity=150)
        except TurnRefused:
            assert conversation.length + len(new) >= 150
            return None
        self.number += 1
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        request = Request(f"turn-{self.number}", whole, params, session=f"c{at}")
        self.llm.scheduler.add(request)
        return at, whole, request

    @rule(data=st.data(), new=tokens, count=st.integers(1, 6))
    def turn(self, data, new, count):
        begun = self.begin(data, new, count)
        if begun is None:
            return
        at, whole, request = begun
        while request.finish is None or self.llm.scheduler.has_work:
            self.llm.scheduler.step()
        assert request.finish.kind is FinishKind.LENGTH
        (expected,) = self.cold.generate([whole], request.params)
        assert request.output.tolist() == expected.token_ids
        self.conversations[at] = self.conversations[at].after(whole, request.output.tolist())

    @rule(data=st.data(), new=tokens, steps=st.integers(0, 4))
    def abandoned_turn(self, data, new, steps):
        begun = self.begin(data, new, 30)
        if begun is None:
            return
        at, _, request = begun
        before = self.conversations[at].tokens.tolist()
        for _ in range(steps):
            self.llm.scheduler.step()
        self.llm.scheduler.abort(request.id)
        while self.llm.scheduler.has_work:
            self.llm.scheduler.step()
        assert self.conversations[at].tokens.tolist() == before

    @rule(data=st.data(), share=st.floats(0, 1))
    def rewind(self, data, share):
        at = data.draw(st.integers(0, len(self.conversations) - 1))
        self.conversations[at] = self.conversations[at].rewound(int(share * self.conversations[at].length))

    @precondition(lambda self: len(self.conversations) < 4)
    @rule(data=st.data())
    def fork(self, data):
        self.conversations.append(data.draw(st.sampled_from(self.conversations)))

    @rule(what=st.sampled_from(["tails", "some", "all", "weights"]))
    def memory_is_taken_away(self, what):
        memory = self.llm.scheduler.memory
        if what == "weights":
            memory.replace_weights()
        elif what == "tails":
            memory.tails.give_up(memory.tails.page_count)
        else:
            memory.tree.evictor.evict(3 if what == "some" else 10**6, "a test")
        memory.audit()

    def teardown(self):
        memory = self.llm.scheduler.memory
        memory.audit()
        counts = memory.counts()
        assert counts.lease == counts.pinned == counts.limbo == 0


@pytest.fixture(scope="module")
def turns(checkpoint):
    limits = {"num_pages": 400, "max_model_len": 400, "max_running_requests": 4, "audit_interval": 1}
    Turns.engines = [LLM(checkpoint=checkpoint, **{**limits, **options}) for options in OPTIONS]
    Turns.cold = LLM(checkpoint=checkpoint, disable_radix_cache=True, max_running_requests=1, num_pages=100)
    yield Turns
    for llm in (*Turns.engines, Turns.cold):
        llm.close()


def test_any_sequence_of_turns_equals_a_cold_run(turns):
    case = turns.TestCase
    case.settings = settings(max_examples=10, stateful_step_count=14, suppress_health_check=list(HealthCheck))
    case().runTest()
