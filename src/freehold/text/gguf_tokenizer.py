"""The tokenizer that a GGUF file carries: a vocabulary, merges and the name of a pre-tokenizer."""

from __future__ import annotations

from collections.abc import Callable
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
    """`field(name, default)` reads the file's metadata. Raises ValueError for an unknown kind."""
    kind = field("tokenizer.ggml.model")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    types: list[int] = field("tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "gpt2":
        fast = _byte_level(tokens, field("tokenizer.ggml.merges"), field("tokenizer.ggml.pre", "default"))
        pieces = byte_level_pieces(tokens)
    elif kind == "llama":
        fast = _sentencepiece(tokens, field("tokenizer.ggml.scores"), field("tokenizer.ggml.add_space_prefix", True))
        pieces = sentencepiece_pieces(tokens)
    else:
        raise ValueError(f"tokenizer kind '{kind}' is not supported (gpt2 and llama are)")
    control = [i for i, kind in enumerate(types) if kind == _CONTROL]
    fast.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    fast.add_tokens([AddedToken(tokens[i], normalized=False) for i, kind in enumerate(types) if kind == _USER_DEFINED])
    return _with_special_tokens(fast, tokens, pieces, control, kind, field)


def _with_special_tokens(
    fast: FastTokenizer,
    tokens: list[str],
    pieces: list[bytes],
    control: list[int],
    kind: str,
    field: Callable[..., Any],
) -> Tokenizer:
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
        fast=fast,
        pieces=pieces,
        special=frozenset(control),
        eos_tokens=eos,
        bos_token=None if bos is None else int(bos),
        adds_bos=bool(field("tokenizer.ggml.add_bos_token", kind == "llama")),
        chat_template=ChatTemplate(source, names) if source else None,
    )


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> FastTokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.startswith("llama")))
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in _DIGIT_BY_DIGIT:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in _PLAIN:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        raise ValueError(f"pre-tokenizer '{pre}' is not supported")
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(tokens: list[str], scores: list[float], prefix_space: bool) -> FastTokenizer:
    """SentencePiece BPE: any two tokens whose concatenation is a token may merge, best score first."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, str, str]] = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                ranked.append((-scores[i], token[:cut], token[cut:]))
    ranked.sort(key=lambda merge: (merge[0], vocabulary[merge[1]], vocabulary[merge[2]]))
    merges = [(left, right) for _, left, right in ranked]
    fast = FastTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[0], fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Prepend("\u2581")] if prefix_space else []
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast
