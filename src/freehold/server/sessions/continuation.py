"""How a chat goes on behind tokens that are there already."""

from __future__ import annotations

from freehold.contract.arrays import Int32
from freehold.text.tokenizer import Tokenizer


def continuation(tokenizer: Tokenizer, tokens: Int32, begin: int, before: str, whole: str) -> str | None:
    """The text that follows `tokens` int32 [n], which end with an answer, in a chat that is `before` up to there and
    `whole` with what is new. Tokens from `begin` on are compared with the text.

    The tokens stay as they were sampled. None where the template does not simply go on behind them: it trims, drops
    thoughts of earlier turns, or writes calls in another way.
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
