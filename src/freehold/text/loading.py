"""Loads a model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer as FastTokenizer

from freehold.models.tensor import Checkpoint
from freehold.text.chat_template import ChatTemplate
from freehold.text.gguf_tokenizer import gguf_tokenizer
from freehold.text.tokenizer import Tokenizer
from freehold.text.vocabulary_bytes import byte_level_pieces, sentencepiece_pieces


def load_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> Tokenizer:
    """Load a model's tokenizer, with the chat template from a file if given. Raises ValueError for an unsupported
    tokenizer and an unreadable template."""
    is_folder = checkpoint.path.is_dir()
    tokenizer = _load_directory(checkpoint.path) if is_folder else gguf_tokenizer(checkpoint.field)
    if chat_template is None:
        return tokenizer
    try:
        return tokenizer.with_chat_template(Path(chat_template).read_text())
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        raise ValueError(f"chat_template: {chat_template} can't be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _load_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{path} has no tokenizer.json")
    fast = FastTokenizer.from_file(str(file))
    config, generation = _read_json(path / "tokenizer_config.json"), _read_json(path / "generation_config.json")
    names = {name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token")
             if (text := _token_text(config.get(name)))}  # fmt: skip
    tokens = [fast.id_to_token(i) or "" for i in range(fast.get_vocab_size(with_added_tokens=True))]
    byte_level = "ByteLevel" in fast.to_str()[:200_000] or "ByteLevel" in repr(fast.decoder)
    eos = generation.get("eos_token_id", _read_json(path / "config.json").get("eos_token_id"))
    if eos is None and "eos_token" in names:
        eos = fast.token_to_id(names["eos_token"])
    eos_list = eos if isinstance(eos, list) else [eos]
    template = path / "chat_template.jinja"
    source = template.read_text() if template.exists() else config.get("chat_template")
    bos = fast.token_to_id(names["bos_token"]) if "bos_token" in names else None
    probe = fast.encode("a", add_special_tokens=True).ids
    return Tokenizer(
        build=lambda: fast,
        pieces=byte_level_pieces(tokens) if byte_level else sentencepiece_pieces(tokens),
        special=frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special),
        eos_tokens=tuple(int(token) for token in eos_list if token is not None),
        bos_token=bos,
        adds_bos=bos is not None and probe[:1] == [bos],
        chat_template=ChatTemplate(source, names) if isinstance(source, str) else None,
        defaults={name: generation[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
                  if generation.get(name) is not None and generation.get("do_sample", True)},
    )  # fmt: skip
