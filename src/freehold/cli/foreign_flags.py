"""Flags of vLLM, SGLang and llama.cpp: their names here, or what to use instead."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

RENAMED = {
    "--model-path": "--model",
    "-m": "--model",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-prefill-tokens": "--chunked-prefill-size",
    "--parallel": "--max-running-requests",
    "-np": "--max-running-requests",
    "--scheduling-policy": "--schedule-policy",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--threads": "--num-threads",
    "-t": "--num-threads",
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--uvicorn-log-level": "--log-level",
    "--api-server-root-path": "--root-path",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--lora-paths": "--lora-modules",
    "--max-loras-per-batch": "--max-loras",
    "--num-speculative-tokens": "--speculative-num-draft-tokens",
    "--speculative-model": "--speculative-draft-model-path",
    "--model-draft": "--speculative-draft-model-path",
    "-md": "--speculative-draft-model-path",
}

# Switches that ask for what is always so.
GRANTED = frozenset({
    "--enable-auto-tool-choice", "--enable-prefix-caching", "--enable-chunked-prefill", "--enable-mixed-chunk",
    "--enable-metrics", "--enable-cache-report", "--enable-prompt-tokens-details", "--metrics", "--jinja", "--slots",
    "--cont-batching", "-cb", "--enforce-eager", "--disable-cuda-graph", "--trust-remote-code",
    "--disable-log-requests", "--disable-log-stats", "--disable-log-prefix-caching-stats", "--allow-auto-truncate",
})  # fmt: skip

_MEMORY = "use --kv-cache-memory-bytes (such as 8GB) or --num-pages"
_FORMAT = "the format of the file decides; --linear-compute and --kv-cache-dtype choose what is computed with"
_ONE_PROCESS = "a model is computed by one process"

# Options of which some values ask for what is always so, with the reason for refusing the others.
LIMITED = {
    "--tensor-parallel-size": ({"1"}, _ONE_PROCESS),
    "--tp-size": ({"1"}, _ONE_PROCESS),
    "--tp": ({"1"}, _ONE_PROCESS),
    "-tp": ({"1"}, _ONE_PROCESS),
    "--pipeline-parallel-size": ({"1"}, _ONE_PROCESS),
    "--pp-size": ({"1"}, _ONE_PROCESS),
    "--expert-parallel-size": ({"1"}, _ONE_PROCESS),
    "--ep-size": ({"1"}, _ONE_PROCESS),
    "--data-parallel-size": ({"1"}, "start several servers, and balance between them"),
    "--dp-size": ({"1"}, "start several servers, and balance between them"),
    "--dp": ({"1"}, "start several servers, and balance between them"),
    "-dp": ({"1"}, "start several servers, and balance between them"),
    "--nnodes": ({"1"}, _ONE_PROCESS),
    "--cpu-offload-gb": ({"0"}, "weights lie in the memory of the CPU"),
    "--tokenizer-mode": ({"auto"}, "the tokenizer comes with the model"),
    "--dtype": ({"auto"}, _FORMAT),
    "--load-format": ({"auto"}, "the format is that of the file"),
    "--device": ({"auto", "cpu"}, "models are computed on the CPU"),
    "--n-gpu-layers": ({"0"}, "models are computed on the CPU"),
    "-ngl": ({"0"}, "models are computed on the CPU"),
    "--preemption-mode": ({"recompute", "swap"}, "a request that gives way finds in the cache what is left of it"),
}

HINTS = {
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--kv-cache-memory": _MEMORY,
    "--max-total-tokens": "use --num-pages",
    "--num-gpu-blocks-override": "use --num-pages",
    "--quantization": _FORMAT,
    "--cache-type-k": "use --kv-cache-dtype, which is for keys and values",
    "--cache-type-v": "use --kv-cache-dtype, which is for keys and values",
    "--speculative-config": "use --speculative-algorithm and --speculative-num-draft-tokens",
    "--speculative-num-steps": "use --speculative-num-draft-tokens",
    "--tokenizer-path": "the tokenizer comes with the model",
    "--tokenizer": "the tokenizer comes with the model",
    "--kv-transfer-config": "use --enable-hierarchical-cache and --hicache-storage-backend",
    "--lora": "use --enable-lora and --lora-modules name=folder",
    "--attention-backend": "kernels are chosen for the processor; --cpu-isa lowers that",
}

# Values that have another name here, by the option's own name.
VALUES = {
    "--kv-cache-dtype": {"auto": "bfloat16"},
    "--tool-call-parser": {
        "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31", "gpt-oss": "gpt_oss", "openai": "gpt_oss",
    },
}  # fmt: skip

# Options with a value that say how GPUs are used, or are limits that there are none of here. They change no answer.
WITHOUT_EFFECT = frozenset({
    "--max-lora-rank", "--hicache-mem-layout", "--hicache-io-backend", "--schedule-conservativeness",
    "--cuda-graph-max-bs", "--cuda-graph-bs", "--max-seq-len-to-capture", "--distributed-executor-backend",
    "--max-parallel-loading-workers", "--tokenizer-worker-num", "--sampling-backend", "--max-cpu-loras",
})  # fmt: skip

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class ForeignFlag(ValueError):
    """A flag of another engine that can't be followed here."""


def translated(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """Give flags of other engines their names here. `switches`: flags that take no value here; other engines give them
    one (`--enable-lora=true`), or write `--no-` before them. Raises ForeignFlag."""
    rest, found = iter(arguments), list[str]()
    for argument in rest:
        if argument == "--":
            return [*found, argument, *rest]
        found += _one(argument, rest, switches)
    return found


def _one(argument: str, rest: Iterator[str], switches: Collection[str]) -> list[str]:
    """Translate an argument, and the value that may follow it in `rest`."""
    flag, equals, value = argument.partition("=")
    if flag in LIMITED:
        granted, reason = LIMITED[flag]
        value = value if equals else next(rest, "")
        if value not in granted:
            raise ForeignFlag(f"{flag} can't be {value or 'empty'} here: {reason}")
        return []
    if flag in WITHOUT_EFFECT:
        if not equals:
            next(rest, "")
        return []
    flag = RENAMED.get(flag, flag)
    if flag in VALUES or flag == "--allowed-origins":
        given = [value] if equals else list(islice(rest, 1))
        return _named_here(flag, given[0]) if given else [flag]
    if flag == "--swap-space":
        value = value if equals else next(rest, "")
        return ["--enable-hierarchical-cache", "--hicache-size", f"{value}GiB"] if value not in ("", "0") else []
    if flag in GRANTED or flag in switches:
        if equals and value.lower() not in _TRUE | _FALSE:
            raise ForeignFlag(f"{flag} is true or false, not {value}")
        is_on = not equals or value.lower() in _TRUE
        if flag in GRANTED and not is_on:
            raise ForeignFlag(f"{flag} can't be turned off here")
        return [flag] if flag in switches and is_on else []
    if flag.startswith("--no-") and f"--{flag[5:]}" in switches:
        return []
    return [flag + equals + value]


def _named_here(flag: str, value: str) -> list[str]:
    """Return a flag with its value's name here. vLLM's origins are a list in JSON; here the flag is repeated."""
    if flag in VALUES:
        return [flag, VALUES[flag].get(value, value)]
    try:
        listed = json.loads(value) if value.startswith("[") else [value]
    except ValueError:
        raise ForeignFlag(f"{flag}: {value} is no list in JSON; repeat the flag for several") from None
    return [part for origin in listed for part in (flag, str(origin))]
