"""Continues a chat after existing tokens."""

from __future__ import annotations

from freehold.contract.arrays import Int32
from freehold.text.tokenizer import Tokenizer


def continuation(tokenizer: Tokenizer, tokens: Int32, begin: int, before: str, whole: str) -> str | None:
    """Return the text that follows `tokens` int32 [n], which end with an answer. `before` is the chat up to there,
    `whole` includes the new messages. Tokens from `begin` on are compared with the text.

    The tokens stay as sampled. Return None if the template does not simply append: it trims, drops thoughts of earlier
    turns, or writes calls differently.
    """
    last = int(tokens[-1])
    end = len(tokens) - (last in tokenizer.eos_tokens)
    written = tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False).lstrip()
    at = before.rfind(written) if begin else 0 if before.lstrip().startswith(written) else -1
    if not written or at < 0 or not whole.startswith(before):
        return None
    text = whole[at + len(written) :] if begin else whole.lstrip()[len(written) :]
    if end < len(tokens):
        text = text.removeprefix(tokenizer.piece(last, False).decode(errors="replace"))
    return text
