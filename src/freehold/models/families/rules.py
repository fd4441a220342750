"""Maps the tensors of layers to their names in files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ABSENT = ""

# Tensors that only some families have.
PRE_NORMS = r"(mixer|ffn)_norm\.weight"
POST_NORMS = r"(mixer|ffn)_post_norm\.weight"
QK_NORMS = r"attention\.[qk]_norm\.weight"
QKV_BIASES = r"attention\.[qkv]\.bias"
ATTENTION_BIASES = r"attention\.([qkv]|output)\.bias"
EXPERT_BIASES = r"experts\..*bias"
SINKS = r"attention\.sinks"
MAMBA_NORM = r"mamba\.norm\.weight"
TAPS_BIAS = r"mamba\.taps\.bias"
SHARED_ROUTER = r"shared\.router\.weight"


class Rule(NamedTuple):
    """A tensor whose name matches `pattern`, without `layers.<index>.`, is the file's `source`, a template of the
    match. `change` gets the tensor and the match. The family has no such tensor if the source is ABSENT. `is_stacked`:
    the source holds all experts, and group 1 of the match is the index."""

    pattern: str
    source: str
    change: Callable[[Any, re.Match[str]], Any] | None = None
    is_stacked: bool = False


def module_name(rules: Sequence[Rule], name: str) -> str | None:
    """Return the module name from the first rule for `layers.<index>.<name>`. None if it changes the tensor."""
    layer = re.match(r"layers\.\d+\.", name)
    if layer is None:
        return None
    for rule, match in fitting(rules, name[layer.end() :]):
        source = match.expand(rule.source)
        is_whole = rule.change is None and not rule.is_stacked
        return f"{layer[0]}{source.removesuffix('.weight')}" if is_whole else None
    return None


def fitting(rules: Sequence[Rule], name: str) -> Iterator[tuple[Rule, re.Match[str]]]:
    """Yield the rules for a name without `layers.<index>.`, in order, up to one that marks it absent."""
    for rule in rules:
        if not (match := re.fullmatch(rule.pattern, name)):
            continue
        if rule.source == ABSENT:
            return
        yield rule, match
