"""A LoRA adapter (Hu et al. 2021) that is loaded: small matrices beside some of a model's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Adapter:
    """A request that computes with it holds it, and so does its row. So it may be unloaded at any time: it is freed
    when no request and no row has it. `fingerprint` is of its content: KV that it computed is found by requests with an
    equal one, and by no other. `factors` are as the engine wants them."""

    name: str
    fingerprint: str
    factors: object


def fingerprint_of(adapter: Adapter | None) -> str:
    """Empty for the model itself."""
    return "" if adapter is None else adapter.fingerprint
