"""The bytes of each token. Output text is their concatenation, so that incremental decoding and the search for stop
strings need no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's 256 printable stand-ins."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


def byte_level_pieces(tokens: Iterable[str]) -> list[bytes]:
    """Return the pieces of byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM)."""
    alphabet = _byte_alphabet()

    def piece(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token, stored literally
            return token.encode()

    return [piece(token) for token in tokens]


def sentencepiece_pieces(tokens: Iterable[str]) -> list[bytes]:
    """Return the pieces of SentencePiece with byte fallback (Llama 2, Mistral)."""

    def piece(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    return [piece(token) for token in tokens]
