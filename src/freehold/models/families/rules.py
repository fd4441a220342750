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


def module_name(rules: Sequence[Rule], name: str) -> str | None:
    """What the first rule for the weight `layers.<index>.<name>` calls its module. None if it changes the tensor."""
    layer = re.match(r"layers\.\d+\.", name)
    if layer is None:
        return None
    for rule, match in fitting(rules, name[layer.end() :]):
        source = match.expand(rule.source)
        return f"{layer[0]}{source.removesuffix('.weight')}" if rule.change is None else None
    return None


def fitting(rules: Sequence[Rule], name: str) -> Iterator[tuple[Rule, re.Match[str]]]:
    """The rules for a name without `layers.<index>.`, in order, up to one that says it is absent."""
    for rule in rules:
        if not (match := re.fullmatch(rule.pattern, name)):
            continue
        if rule.source == ABSENT:
            return
        yield rule, match
