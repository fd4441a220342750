"""The tokenizer in a GGUF file: a vocabulary, merges and the name of a pre-tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from freehold.text.chat_template import ChatTemplate
from freehold.text.tokenizer import Tokenizer
from freehold.text.vocabulary_bytes import byte_level_pieces, sentencepiece_pieces

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_DIGIT_BY_DIGIT = ("smollm",)
_PLAIN = ("gpt-2", "default")


def gguf_tokenizer(field: Callable[..., Any]) -> Tokenizer:
    """Build the tokenizer; `field(name, default)` reads the file's metadata. Raises ValueError for an unknown kind."""
    kind, tokens = field("tokenizer.ggml.model"), field("tokenizer.ggml.tokens")
    if kind == "gpt2":
        _split(field("tokenizer.ggml.pre", "default"))
        pieces = byte_level_pieces(tokens)
    elif kind == "llama":
        pieces = sentencepiece_pieces(tokens)
    else:
        raise ValueError(f"tokenizer kind '{kind}' is not supported (gpt2 and llama are)")
    return _with_special_tokens(tokens, pieces, kind, field)


def _build(field: Callable[..., Any]) -> FastTokenizer:
    fast = _byte_level(field) if field("tokenizer.ggml.model") == "gpt2" else _sentencepiece(field)
    tokens: list[str] = field("tokenizer.ggml.tokens")
    control, own = (_of_type(field, kind) for kind in (_CONTROL, _USER_DEFINED))
    fast.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    fast.add_tokens([AddedToken(tokens[i], normalized=False) for i in own])
    return fast


def _numbered(field: Callable[..., Any]) -> dict[str, int]:
    return {token: number for number, token in enumerate(field("tokenizer.ggml.tokens"))}


def _of_type(field: Callable[..., Any], wanted: int) -> list[int]:
    return [token for token, kind in enumerate(field("tokenizer.ggml.token_type", ())) if kind == wanted]


def _with_special_tokens(tokens: list[str], pieces: list[bytes], kind: str, field: Callable[..., Any]) -> Tokenizer:
    control = _of_type(field, _CONTROL)
    bos = field("tokenizer.ggml.bos_token_id")
    ends = [field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    eos = tuple(dict.fromkeys(int(token) for token in ends if token is not None))
    for i in control:
        pieces[i] = tokens[i].encode()
    names = {"bos_token": tokens[bos]} if bos is not None else {}
    if eos:
        names["eos_token"] = tokens[eos[0]]
    source = field("tokenizer.chat_template")
    return Tokenizer(
        build=partial(_build, field),
        pieces=pieces,
        special=frozenset(control),
        eos_tokens=eos,
        bos_token=None if bos is None else int(bos),
        adds_bos=bool(field("tokenizer.ggml.add_bos_token", kind == "llama")),
        chat_template=ChatTemplate(source, names) if source else None,
    )


def _split(pre: str) -> list[Any]:
    """Return the steps before byte-level BPE. Raises ValueError for an unknown name."""
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pre in _DIGIT_BY_DIGIT:
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre in _PLAIN:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    raise ValueError(f"pre-tokenizer '{pre}' is not supported")


def _byte_level(field: Callable[..., Any]) -> FastTokenizer:
    """Build the tokenizer via files: Python copies of a vocabulary of 150,000 tokens would take 50 MB."""
    pre = field("tokenizer.ggml.pre", "default")
    with TemporaryDirectory(prefix="freehold-") as folder:
        of_tokens, of_merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        of_tokens.write_text(json.dumps(_numbered(field)))
        of_merges.write_text("\n".join(field("tokenizer.ggml.merges")), encoding="utf-8")
        bpe = models.BPE.from_file(str(of_tokens), str(of_merges), ignore_merges=pre.startswith("llama"))
    fast = FastTokenizer(bpe)
    fast.pre_tokenizer = pre_tokenizers.Sequence(_split(pre))
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(field: Callable[..., Any]) -> FastTokenizer:
    """Build SentencePiece BPE: any two tokens whose concatenation is a token may merge, best score first."""
    vocabulary, scores = _numbered(field), field("tokenizer.ggml.scores")
    ranked: list[tuple[float, str, str]] = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                ranked.append((-scores[i], token[:cut], token[cut:]))
    ranked.sort(key=lambda merge: (merge[0], vocabulary[merge[1]], vocabulary[merge[2]]))
    merges = [(left, right) for _, left, right in ranked]
    unknown = next(iter(vocabulary))
    fast = FastTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Prepend("\u2581")] if field("tokenizer.ggml.add_space_prefix", True) else []
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast
