"""The gain of speculation: prompt lookup against plain decoding, interleaved in one run."""

from __future__ import annotations

import statistics
import time

from rich.console import Console
from rich.table import Table

from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM

ROUNDS = 5
OUTPUT_TOKENS = 96

_CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""
_NEWS = (
    "The city council voted on Tuesday to reopen the old railway bridge to pedestrians. Engineers had closed the "
    "bridge in 1998 after a flood damaged two of its stone piers. The repair will cost four million dollars and "
    "take two years. A local group of volunteers had collected twelve thousand signatures for the project."
)
REPETITIVE = {
    "repeat code": f"# file one\n{_CODE}\n# file two, the same as file one\n{_CODE}\n# file three, the same\n",
    "edit code": f"# before\n{_CODE}\n# after, with Account renamed to Wallet\n{_CODE.replace('Account', 'Wallet')}\n"
    f"# before\n{_CODE.replace('owner', 'holder')}\n# after, with Account renamed to Wallet\n",
    "summarise": f"Article: {_NEWS}\n\nQuoted in full: {_NEWS}\n\nThe main sentences of the article:",
}
ORDINARY = {
    "advice": "How do I keep my desk tidy when I work from home?",
    "story": "Tell me a short story about a lighthouse keeper who is afraid of the dark.",
    "explain": "Why is the sky blue during the day and red in the evening?",
    "plan": "Plan a weekend in a small mountain town for two people who like food.",
}


def run_speculation() -> int:
    """Print ratios. Return exit code 0 if the goals are met."""
    console = Console()
    with (
        console.status("Measuring, about three minutes ..."),
        LLM(disable_radix_cache=True) as plain,
        LLM(disable_radix_cache=True, speculative_algorithm="ngram") as lookup,
    ):
        repetitive = {name: _ratio(plain, lookup, text) for name, text in REPETITIVE.items()}
        ordinary = {name: _ratio(plain, lookup, _chat(plain, text)) for name, text in ORDINARY.items()}
    table = Table(
        "prompt", "plain, tokens/s", "prompt lookup", "ratio", "accepted", "goal", title="Speculation, batch 1"
    )
    for kind, goal in ((repetitive, 1.5), (ordinary, 0.95)):
        for name, (slow, fast, accepted) in kind.items():
            table.add_row(name, f"{slow:.1f}", f"{fast:.1f}", f"{fast / slow:.2f} x", accepted, f">= {goal} x")
    console.print(table)
    pays = all(fast >= 1.5 * slow for slow, fast, _ in repetitive.values())
    harmless = all(fast >= 0.95 * slow for slow, fast, _ in ordinary.values())
    return 0 if pays and harmless else 1


def _chat(llm: LLM, text: str) -> str:
    template = llm.tokenizer.chat_template
    assert template is not None
    return template.render([{"role": "user", "content": text}], True)


def _ratio(plain: LLM, lookup: LLM, prompt: str) -> tuple[float, float, str]:
    """Return median decode speeds, and the share of drafts accepted. Both outputs must be equal."""
    slow: list[float] = []
    fast: list[float] = []
    before = lookup.scheduler.results.drafted_count, lookup.scheduler.results.accepted_count
    for _ in range(ROUNDS):
        one, two = _decode(plain, prompt), _decode(lookup, prompt)
        assert one[1] == two[1], "speculation changed the output"
        slow.append(one[0])
        fast.append(two[0])
    drafted = lookup.scheduler.results.drafted_count - before[0]
    accepted = lookup.scheduler.results.accepted_count - before[1]
    share = f"{accepted} of {drafted}" if drafted else "-"
    return statistics.median(slow), statistics.median(fast), share


def _decode(llm: LLM, prompt: str) -> tuple[float, list[int]]:
    """Return tokens per second after the first token, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    tokens: list[int] = []
    (request,) = llm.requests([prompt], params)
    llm.scheduler.add(request)
    started = 0.0
    first = 0
    while request.finish is None:
        tokens += llm.scheduler.step().tokens
        if tokens and not started:
            started, first = time.perf_counter(), len(tokens)
    seconds = time.perf_counter() - started
    while llm.scheduler.has_work:
        llm.scheduler.step()
    return (len(tokens) - first) / seconds, tokens
