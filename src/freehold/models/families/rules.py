"""Where a file has the tensors that layers ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ABSENT = ""


class Rule(NamedTuple):
    """A tensor whose name matches `pattern`, without `layers.<index>.`, is the file's `source`, a template of the
    match. `change` gets the tensor and the match. The family has no such tensor if the source is ABSENT."""

    pattern: str
    source: str
    change: Callable[[Any, re.Match[str]], Any] | None = None


def fitting(rules: Sequence[Rule], name: str) -> Iterator[tuple[Rule, re.Match[str]]]:
    """The rules for a name without `layers.<index>.`, in order, up to one that says it is absent."""
    for rule in rules:
        if not (match := re.fullmatch(rule.pattern, name)):
            continue
        if rule.source == ABSENT:
            return
        yield rule, match
