"""What is in use is asked for in storage, which keeps it longer, and what storage has lost it is given again."""

import numpy as np
import pytest
from tier_bench import FULL, SIZE, STATE, TOKENS, WINDOW, Bench

from freehold.contract.orders import Kind
from freehold.memory import PrefetchPolicy, WritePolicy
from freehold.memory.tiers.confirming import INTERVAL_S
from freehold.memory.tiers.transfer import LATE_S

WAIT = PrefetchPolicy.WAIT_COMPLETE


def rounds(bench, count):
    for _ in range(count):
        bench.turn(INTERVAL_S)
        bench.settle()


def use(bench, tokens=TOKENS):
    """A request goes on from a prefix."""
    lease = bench.memory.leases.open(bench.memory.match("", np.append(tokens, np.int32(0))))
    lease.use()
    lease.release()


@pytest.mark.parametrize(
    ("policy", "host", "groups"),
    [
        (WritePolicy.WRITE_THROUGH, 64, [FULL]), (WritePolicy.WRITE_THROUGH, 64, [FULL, WINDOW]),
        (WritePolicy.WRITE_THROUGH, 64, [FULL, STATE]), (WritePolicy.WRITE_THROUGH, 9, [FULL]),
        (WritePolicy.WRITE_THROUGH, 9, [FULL, STATE]), (WritePolicy.WRITE_BACK, 64, [FULL]),
    ],
)  # fmt: skip
def test_what_storage_has_lost_is_stored_again_when_it_is_used(policy, host, groups):
    """Whether the host has it or, being small and full of others, the device alone."""
    bench = Bench(*groups, policy=policy, host=host, storage=WAIT)
    for tokens in (TOKENS, TOKENS + 100):
        bench.compute(tokens)
        if policy is WritePolicy.WRITE_BACK:
            bench.evict_all()
        bench.settle()
    assert [bench.load(tokens) for tokens in (TOKENS, TOKENS + 100)] == [len(TOKENS)] * 2
    before = dict(bench.mover.stored)
    use(bench)
    rounds(bench, 4)
    assert bench.mover.stored == before, "nothing is stored twice"
    for key in list(before)[::2]:
        del bench.mover.stored[key]
    use(bench)
    use(bench, TOKENS + 100)
    rounds(bench, 6)
    if policy is WritePolicy.WRITE_BACK:  # what the device alone has is stored when it is evicted
        bench.evict_all()
        bench.settle()
    assert bench.mover.stored.keys() >= before.keys()


def test_ends_are_asked_for_before_beginnings_one_question_at_a_time(monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.confirming.COLUMNS_AT_ONCE", 3)
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.settle()
    use(bench)
    asked = []
    while True:
        bench.turn()
        questions = [order for order, _ in bench.mover.orders if order.kind is Kind.PROBE]
        if not questions:
            break
        assert len(questions) == 1
        asked += bench.mover.end(questions[0]).keys[0]
    assert asked == list(bench.mover.stored)[::-1]
    assert len(asked) == len(TOKENS) // SIZE
    rounds(bench, 2)
    assert bench.tiers.transfers.counts[Kind.PROBE].ended == 3, "it has not been used since"


def test_one_question_is_about_several_nodes_and_what_any_of_them_lost_is_stored_again():
    bench = Bench(storage=WAIT)
    for tokens in (TOKENS, TOKENS + 100):
        bench.compute(tokens)
        bench.settle()
    before = dict(bench.mover.stored)
    for key in [next(iter(before)), list(before)[-1]]:  # of the first node, and of the last
        del bench.mover.stored[key]
    use(bench)
    use(bench, TOKENS + 100)
    rounds(bench, 1)
    assert bench.tiers.transfers.counts[Kind.PROBE].ended == 1
    rounds(bench, 2)
    assert bench.mover.stored == before


def test_a_question_that_is_never_answered_does_not_end_all_questions():
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.settle()
    for number in range(3):
        use(bench)
        bench.turn(INTERVAL_S)
        assert sum(order.kind is Kind.PROBE for order, _ in bench.mover.orders) == number + 1
        bench.turn(LATE_S[Kind.PROBE] + 0.1)


def test_storage_that_goes_is_asked_no_more():
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.settle()
    use(bench)
    bench.tiers.detach()
    rounds(bench, 2)
    assert bench.tiers.transfers.counts[Kind.PROBE].ended == 0
    use(bench)
    bench.tiers.attach(WAIT)
    bench.settle()
    rounds(bench, 2)
    assert bench.tiers.transfers.counts[Kind.PROBE].ended == 0, "what was used before is of no account"
    use(bench)
    rounds(bench, 2)
    assert bench.tiers.transfers.counts[Kind.PROBE].ended == 1
