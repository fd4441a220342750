"""Cache groups: layers that share a retention rule."""

from dataclasses import dataclass
from enum import StrEnum


class RetentionRule(StrEnum):
    """How much of a sequence a layer needs to keep."""

    FULL = "full"  # every token
    WINDOW = "window"  # the last W tokens
    STATE = "state"  # one recurrent state a sequence


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose KV lives and dies together. A model has one or more."""

    name: str = "full"
    rule: RetentionRule = RetentionRule.FULL

    def __post_init__(self) -> None:
        if self.rule is not RetentionRule.FULL:
            raise ValueError(f"cache group {self.name}: retention rule '{self.rule}' is not supported yet")


def cache_groups(has_draft_model: bool) -> tuple[CacheGroup, ...]:
    """A draft model keeps its KV in a group of its own, taken, published and freed with the model's."""
    return (CacheGroup(), CacheGroup("draft")) if has_draft_model else (CacheGroup(),)
