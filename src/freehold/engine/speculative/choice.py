"""Creates the configured speculator."""

from __future__ import annotations

from freehold.config import EngineConfig
from freehold.contract.step import KVShape
from freehold.engine.device import Device
from freehold.engine.sampler import Sampler
from freehold.engine.speculative.draft_model import LAG_MAX, DraftModelSpeculator
from freehold.engine.speculative.ngram import NgramSpeculator
from freehold.engine.speculative.speculator import Speculator
from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.models.loading.truncated import TruncatedCheckpoint
from freehold.models.tensor import Checkpoint


def open_draft(config: EngineConfig, target: Checkpoint) -> Checkpoint:
    """Open the draft model. Raises ValueError if it cannot draft for `target`."""
    path = config.speculative_draft_model_path
    draft = target if path is None else open_checkpoint(resolve_model(path))
    if config.speculative_draft_layers is not None:
        draft = TruncatedCheckpoint(draft, config.speculative_draft_layers)
    if draft.spec.vocab_size != target.spec.vocab_size:
        raise ValueError(
            f"speculative_draft_model_path: its vocabulary has {draft.spec.vocab_size} tokens, "
            f"the model's {target.spec.vocab_size}"
        )
    if draft.spec.has_states:
        option = "speculative_draft_model_path" if path else "speculative_draft_layers"
        raise ValueError(f"{option}: a {draft.spec.architecture} model keeps states, so it cannot be a draft model")
    return draft


def make_speculator(
    config: EngineConfig, target: Checkpoint, shape: KVShape, device: Device, sampler: Sampler
) -> Speculator | None:
    """Return the speculator, None without speculation. Raises ValueError or ModelUnavailable."""
    if config.speculative_algorithm is None:
        return None
    if config.speculative_algorithm == "ngram":
        return NgramSpeculator()
    lag_max = 0 if target.spec.has_states else LAG_MAX
    return DraftModelSpeculator(open_draft(config, target), shape, device, sampler, lag_max)
