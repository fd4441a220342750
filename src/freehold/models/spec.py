"""A model's description: its layers, their caches, and the resulting cache groups."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

# Bytes per number and per vector, by KV type: int8 has a float32 scale for each vector.
_VECTOR_BYTES = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}


def difference(found: Any, expected: Any, name: str = "") -> str:
    """Return the first field in which two descriptions differ, such as "hidden_size is 512, expected 576"."""
    if type(found) is type(expected) and is_dataclass(expected):
        parts = [
            (f"{name}.{one.name}", getattr(found, one.name), getattr(expected, one.name)) for one in fields(expected)
        ]
    elif isinstance(found, tuple) and isinstance(expected, tuple):
        if len(found) != len(expected):
            return f"{len(found)} {name.lstrip('.')}, expected {len(expected)}"
        parts = [(f"{name}.{i}", one, other) for i, (one, other) in enumerate(zip(found, expected, strict=True))]
    else:
        return f"{name.lstrip('.')} is {found}, expected {expected}"
    return next(difference(one, other, where) for where, one, other in parts if one != other)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021), halves layout: number k is rotated with number k + len(frequencies).

    `frequencies`: radians per position, for each pair. `magnitude` scales cos and sin (YaRN; Peng et al. 2023).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0

    @property
    def size(self) -> int:
        """The number of rotated dimensions of a head."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class KVCache:
    """A key and a value for each token, or a latent whose first `value_size` numbers are the value."""

    head_count: int
    key_size: int
    value_size: int
    is_latent: bool = False

    def bytes_per_token(self, kind: str) -> int:
        """Return the size; `kind` is one of KV_CACHE_DTYPES."""
        number, scale = _VECTOR_BYTES[kind]
        value = 0 if self.is_latent else number * self.value_size + scale
        return self.head_count * (number * self.key_size + scale + value)


@dataclass(frozen=True)
class StateCache:
    """One state in float32 after all tokens so far: the last inputs of a convolution, then a recurrence's state."""

    convolution: int
    recurrence: int = 0

    @property
    def size(self) -> int:
        return self.convolution + self.recurrence


class Mixer(Protocol):
    """The part of a layer in which tokens interact."""

    @property
    def cache(self) -> KVCache | StateCache:
        """Its cache for later tokens."""
        ...

    @property
    def window(self) -> int | None:
        """The number of tokens that a position attends to, itself included. None is all."""
        ...


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. Biases, norms of queries and keys, and sinks are used if the checkpoint has them.

    `scale` None is 1 / sqrt(head_size). `soft_cap` c turns a score s into c * tanh(s / c); 0 disables it. With an
    `output_gate` the query projection has a gate after each head's query. `wide_norms` of queries and keys apply to all
    heads together. `input_multiplier` scales queries, keys and values, `key_multiplier` keys.
    """

    head_count: int
    kv_head_count: int
    head_size: int
    rotary: Rotary | None
    window: int | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    output_gate: bool = False
    wide_norms: bool = False
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0

    @property
    def cache(self) -> KVCache:
        return KVCache(self.kv_head_count, self.head_size, self.head_size)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024): all heads share a latent of `rank` numbers and a rotated key.

    `plain_size` numbers of a head's query and key are not rotated. `is_interleaved`: the file stores rotated numbers in
    neighbouring pairs. `query_rank`: rank of queries, if they have their own latent.
    """

    head_count: int
    rank: int
    plain_size: int
    value_size: int
    rotary: Rotary
    scale: float
    is_interleaved: bool = False
    query_rank: int | None = None
    window: None = None

    @property
    def cache(self) -> KVCache:
        return KVCache(1, self.rank + self.rotary.size, self.rank, is_latent=True)


@dataclass(frozen=True)
class ShortConv:
    """A gated convolution over the last `taps` tokens (LFM2; Liquid AI 2025)."""

    channels: int
    taps: int
    window: int = 2

    @property
    def cache(self) -> StateCache:
        return StateCache((self.taps - 1) * self.channels)


@dataclass(frozen=True)
class Mamba2:
    """A state space model (Dao and Gu 2024): each head has a state [state_size, head_size]; `group_count` groups of
    heads share inputs and outputs of the state. `multipliers` scale gate, input, B, C and time step of the
    projection."""

    head_count: int
    head_size: int
    state_size: int
    group_count: int
    taps: int
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    norm_before_gate: bool = False
    window: int = 2

    @property
    def inner_size(self) -> int:
        return self.head_count * self.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.inner_size + 2 * self.group_count * self.state_size

    @property
    def cache(self) -> StateCache:
        return StateCache((self.taps - 1) * self.channels, self.head_count * self.head_size * self.state_size)


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule (Yang, Kautz and Hatamizadeh 2024): each value head has a state [key_size, value_size].

    Value heads that read the same key head are neighbours; with `tiled_heads`, value head v reads key head v %
    key_head_count.
    """

    key_head_count: int
    value_head_count: int
    key_size: int
    value_size: int
    taps: int
    window: int = 2
    tiled_heads: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_head_count * self.key_size + self.value_head_count * self.value_size

    @property
    def cache(self) -> StateCache:
        return StateCache((self.taps - 1) * self.channels, self.value_head_count * self.key_size * self.value_size)


@dataclass(frozen=True)
class Activation:
    """Combines the halves of a feed-forward layer's input, gate and up. `kind` "silu" or "gelu" (tanh form) of gate,
    times up; or gpt-oss's "clamped": both clamped to `limit`, gate * sigmoid(alpha * gate) * (up + 1)."""

    kind: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Dense:
    size: int
    activation: Activation = Activation()
    gate_multiplier: float = 1.0


@dataclass(frozen=True)
class Routing:
    """How a token's experts and their weights are chosen.

    `scores` of an expert: "softmax" over all experts, "sigmoid" of its own, or "chosen", a softmax over the chosen
    experts. With "sigmoid" the router has a correction. If `group_count` exceeds 1, only the best `groups_used` groups
    of experts count. A group's score is its best expert, or the sum of its best two (`group_by_two`).
    """

    used: int
    scores: str = "softmax"
    normalize: bool = True
    factor: float = 1.0
    group_count: int = 1
    groups_used: int = 1
    group_by_two: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts. `shared_size`: of the expert that computes every token, 0 for none."""

    count: int
    size: int
    routing: Routing
    activation: Activation = Activation()
    shared_size: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """A layer: parallel mixers, each added to the hidden states, then a feed-forward part, if any.

    `mixer_multipliers` and `ffn_multiplier` scale what is added. Norms before and after a part are used if the
    checkpoint has them.
    """

    mixers: tuple[Mixer, ...]
    ffn: Dense | Experts | None
    mixer_multipliers: tuple[float, ...] = (1.0,)
    ffn_multiplier: float = 1.0


@dataclass(frozen=True)
class CacheLayout:
    """A cache group as seen by the engine: the caches of mixers with the same lookback. `members`: layer, and index
    among the layer's mixers. `has_windows`: one of them has a window."""

    lookback: int | None
    is_state: bool
    has_windows: bool
    members: tuple[tuple[int, int], ...]
    caches: tuple[KVCache | StateCache, ...]

    def page_bytes(self, kind: str, page_size: int) -> int:
        """Return the bytes of one page of the group: KV of `page_size` tokens, or a state."""
        return sum(
            4 * cache.size if isinstance(cache, StateCache) else page_size * cache.bytes_per_token(kind)
            for cache in self.caches
        )


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. `logit_multiplier` scales logits, `logit_cap` c turns a logit x into c * tanh(x / c); 0 disables it.
    `parts`: patterns of layer tensors that this family requires, though others lack them."""

    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float = 0.0
    parts: tuple[str, ...] = ()

    @property
    def expert_count(self) -> int:
        """Experts per layer; 0 without any."""
        return max((layer.ffn.count for layer in self.layers if isinstance(layer.ffn, Experts)), default=0)

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def has_states(self) -> bool:
        return any(layout.is_state for layout in self.cache_layouts())

    def cache_layouts(self) -> list[CacheLayout]:
        """Return the cache groups: full attention first, then windows, smallest first, then states."""
        found: dict[tuple[bool, int | None], list[tuple[int, int]]] = {}
        for layer, spec in enumerate(self.layers):
            for number, mixer in enumerate(spec.mixers):
                lookback = None if mixer.window is None else mixer.window - 1
                found.setdefault((isinstance(mixer.cache, StateCache), lookback), []).append((layer, number))
        order = sorted(found, key=lambda kind: (kind[0], kind[1] is not None, kind[1] or 0))
        return [self._layout(kind[1], kind[0], tuple(found[kind])) for kind in order]

    def one_layout(self) -> list[CacheLayout]:
        """Return one group of all layers that keeps every token, regardless of windows. Not for models with states."""
        assert not self.has_states
        everything = tuple(
            (layer, number) for layer, spec in enumerate(self.layers) for number in range(len(spec.mixers))
        )
        return [self._layout(None, False, everything)]

    def _layout(self, lookback: int | None, is_state: bool, members: tuple[tuple[int, int], ...]) -> CacheLayout:
        mixers = [self.layers[layer].mixers[number] for layer, number in members]
        has_windows = any(mixer.window is not None for mixer in mixers)
        return CacheLayout(lookback, is_state, has_windows, members, tuple(mixer.cache for mixer in mixers))
