"""LoRA adapters say what merged weights say, whoever computes beside them."""

import gc
import json
import shutil
import time

import numpy as np
import peft
import pytest
import torch
import transformers
from gguf_writer import write_gguf
from safetensors.numpy import load_file, save_file
from tiny_models import prompts_of

from freehold import LLM, SamplingParams
from freehold.contract.errors import BadRequest, InvalidParameter, NotFound
from freehold.engine.cpu.backend import CpuBackend
from freehold.engine.cpu.low_rank import AdaptedMatrix
from freehold.memory.explain import explain_miss
from freehold.models.loading.gguf_file import GgufCheckpoint
from freehold.models.loading.hf_directory import HfCheckpoint

EXACT = {"linear_compute": "float32", "kv_cache_dtype": "float32", "audit_interval": 2}
SCORED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs_start=0)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Ranks that fill no lanes, ranks of their own for some modules, another scaling; one leaves most modules as they are.
ADAPTERS = {
    "all": {"r": 5, "lora_alpha": 9, "target_modules": ALL, "rank_pattern": {"k_proj": 3}},
    "some": {"r": 16, "lora_alpha": 4, "target_modules": ["v_proj", "down_proj"], "use_rslora": True},
    "one": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "alpha_pattern": {"layers.1.self_attn.q_proj": 30}},
}


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """family -> (the model's folder, each adapter's folder and that of the weights that peft merges it into)."""
    known = {}

    def make(name: str):
        if name not in known:
            known[name] = folders(name), {one: save(folders(name), one, tmp_path_factory) for one in ADAPTERS}
        return known[name]

    return make


def save(base, name: str, tmp_path_factory):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(len(name))
    adapted = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS[name], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for tensor, values in adapted.named_parameters():
            if "lora_B" in tensor:
                values.normal_(std=0.2)
    folder, merged = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp(f"{name}-merged")
    adapted.save_pretrained(folder)
    adapted.merge_and_unload().save_pretrained(merged)
    for file in base.iterdir():
        if not (merged / file.name).exists():
            shutil.copy(file, merged)
    return folder, merged


def said(output):
    scores = [*output.prompt_logprobs, *output.logprobs]
    return output.token_ids, np.array([entry.logprob for entry in scores])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "smollm3"])
def test_an_adapter_says_what_merged_weights_say(made, family):
    base, adapters = made(family)
    (prompt,) = prompts_of([120])
    modules = tuple(f"{name}={folder}" for name, (folder, _) in adapters.items())
    with LLM(str(base), lora_modules=modules, **EXACT) as llm:
        plain = said(llm.generate([prompt], SCORED)[0])
        for name, (_, merged) in adapters.items():
            with LLM(str(merged), **EXACT) as other:
                expected = said(other.generate([prompt], SCORED)[0])
            found = said(llm.generate([prompt], SCORED, adapter=name)[0])
            assert found[0] == expected[0]
            assert np.abs(found[1] - expected[1]).max() < 2e-4
            assert np.abs(found[1] - plain[1]).max() > 0.02, "the adapter changes nothing"


@pytest.mark.parametrize(("family", "is_same"), [("llama", True), ("gemma3", True), ("falcon-h1", False)])
def test_modules_of_a_gguf_file_are_those_of_the_model_it_was_made_of(folders, tmp_path, family, is_same):
    """Tensors are equal (test_gguf.py), so adapters fit, except where the converter has multiplied them."""
    write_gguf(folders(family), tmp_path / "model.gguf")
    ours, theirs = GgufCheckpoint(tmp_path / "model.gguf"), HfCheckpoint(folders(family))
    for part in ("attention.q", "attention.k", "attention.output", "ffn.down"):
        name = f"layers.1.{part}.weight"
        assert ours.module(name) == (theirs.module(name) if is_same else None)
    assert theirs.module("layers.1.attention.q.weight") == "layers.1.self_attn.q_proj"
    assert ours.module("embedding.weight") is ours.module("layers.1.nothing.weight") is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (1, {"chunked_prefill_size": 7}),
        (4, {"speculative_algorithm": "ngram", "forward_retract_interval": 3}),
        (16, {"disable_overlap_schedule": True, "num_pages": 24}),
        (64, {"speculative_algorithm": "draft", "speculative_draft_layers": 1}),
        (256, {"forward_retract_interval": 5}),
        (4, {"enable_hierarchical_cache": True, "num_pages": 160}),
    ],
)
def test_several_adapters_in_one_step_leave_each_other_alone(made, page_size, options):
    """The tokens of a request do not depend on what is computed beside it, cached before it, or taken from it."""
    base, adapters = made("qwen2")
    names = [None, *adapters]
    modules = tuple(f"{name}={folder}" for name, (folder, _) in adapters.items())
    shared, *others = prompts_of([70, 30, 5, 41])
    asked = [(prompt, name) for prompt in (shared, *others, [*shared, 9, 9]) for name in names]
    cold = {}
    with LLM(str(base), lora_modules=modules, disable_radix_cache=True, max_running_requests=1, **EXACT) as llm:
        for prompt, name in asked:
            cold[tuple(prompt), name] = llm.generate([prompt], GREEDY, adapter=name)[0].token_ids
    assert len({tuple(cold[tuple(shared), name]) for name in names}) == len(names)
    with LLM(str(base), lora_modules=modules, max_running_requests=6, page_size=page_size, **options, **EXACT) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt for prompt, _ in asked], GREEDY, adapter=[name for _, name in asked])
            for (prompt, name), output in zip(asked, outputs, strict=True):
                assert output.token_ids == cold[tuple(prompt), name], name


def test_a_prefix_is_found_by_the_content_of_the_adapter(made):
    base, adapters = made("qwen2")
    (prompt,) = prompts_of([100])
    with LLM(str(base), enable_lora=True, **EXACT) as llm:
        llm.load_adapter("a", str(adapters["all"][0]))
        llm.load_adapter("same", str(adapters["all"][0]))
        llm.load_adapter("other", str(adapters["some"][0]))
        (first,) = llm.generate([prompt], GREEDY, adapter="a")
        found = {name: llm.generate([prompt], GREEDY, adapter=name)[0] for name in ("a", "same", "other", None)}
        assert {name: output.cached_tokens for name, output in found.items()} == {
            "a": 96, "same": 96, "other": 0, None: 0
        }  # fmt: skip
        assert found["a"].token_ids == found["same"].token_ids == first.token_ids
        memory = llm.scheduler.memory
        match = memory.match("", np.array([*prompt[:50], 7, 7], np.int32), adapter="else")
        assert explain_miss(memory, match, np.array(prompt, np.int32)).reason == "adapter"
        # Another one under the same name does not find what the first has left.
        llm.unload_adapter("a")
        llm.load_adapter("a", str(adapters["one"][0]))
        (second,) = llm.generate([prompt], GREEDY, adapter="a")
        assert second.cached_tokens == 0
        assert second.token_ids != first.token_ids


def test_requests_that_have_an_adapter_end_with_it(made):
    """Also those that wait, or are retracted meanwhile."""
    base, adapters = made("qwen2")
    many = prompts_of([20] * 4)
    with LLM(str(base), lora_modules=(f"a={adapters['all'][0]}",), max_running_requests=2, **EXACT) as llm:
        whole = [output.token_ids for output in llm.generate(many, GREEDY, adapter="a")]
    options = {"max_running_requests": 2, "forward_retract_interval": 4, **EXACT}
    with LLM(str(base), lora_modules=(f"a={adapters['all'][0]}",), **options) as llm:
        requests = llm.requests(many, GREEDY, "a")
        for request in requests:
            llm.scheduler.add(request)
        for _ in range(5):
            llm.scheduler.step()
        llm.unload_adapter("a")
        with pytest.raises(NotFound):
            llm.generate(many, GREEDY, adapter="a")
        while llm.scheduler.requests:
            llm.scheduler.step()
        assert [request.output.tolist() for request in requests] == whole


def test_what_is_no_adapter_of_the_model_is_refused(made, tmp_path):
    base, adapters = made("qwen2")
    folder = adapters["one"][0]

    def changed(name: str, config=None, rename=None, weights=None):
        target = tmp_path / name
        shutil.copytree(folder, target)
        values = json.loads((target / "adapter_config.json").read_text())
        (target / "adapter_config.json").write_text(json.dumps({**values, **(config or {})}))
        file = target / "adapter_model.safetensors"
        tensors = {(rename or str)(key): value for key, value in load_file(file).items()}
        save_file({key: np.ascontiguousarray((weights or np.asarray)(value)) for key, value in tensors.items()}, file)
        return str(target)

    (tmp_path / "empty").mkdir()
    damaged = changed("damaged")
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"\x07" * 64)
    wrong = {
        str(tmp_path / "empty"): "is no adapter",
        damaged: "can't be read",
        changed("ia3", config={"peft_type": "IA3"}): "IA3",
        changed("dora", config={"use_dora": True}): "use_dora",
        changed("saved", config={"modules_to_save": ["lm_head"]}): "modules_to_save",
        changed("elsewhere", rename=lambda key: key.replace("q_proj", "lm_head")): "lm_head",
        changed("deeper", rename=lambda key: key.replace("layers.1.", "layers.77.")): "layers.77.self_attn.q_proj",
        changed("half", rename=lambda key: key.replace("lora_B", "lora_embedding_B")): "not supported",
        changed("wide", weights=lambda value: value[:, : value.shape[1] // 2]): "don't fit",
        changed("narrow", weights=lambda value: value if len(value) < 3 else value[::2]): "another shape",
    }
    with LLM(str(base), enable_lora=True, max_loras=1, **EXACT) as llm:
        for path, words in wrong.items():
            with pytest.raises(InvalidParameter, match=words) as refused:
                llm.load_adapter("a", path)
            assert refused.value.field == "lora_path"
        llm.load_adapter("a", str(folder))
        for name, words in (("a", "already loaded"), ("b", "the limit is 1")):
            with pytest.raises(InvalidParameter, match=words):
                llm.load_adapter(name, str(folder))
    with LLM(str(base), **EXACT) as llm, pytest.raises(InvalidParameter, match="switched off"):
        llm.load_adapter("a", str(folder))


def test_an_update_of_weights_that_fails_leaves_nothing_behind(made, monkeypatch):
    base, adapters = made("qwen2")
    (prompt,) = prompts_of([20])
    with LLM(str(base), lora_modules=(f"all={adapters['all'][0]}",), **EXACT) as llm:
        (before,) = llm.generate([prompt], GREEDY, adapter="all")
        matrices = count_matrices()
        kept, calls = CpuBackend.pack, iter(range(100))

        def pack(backend, tensors, names=()):
            if next(calls) == 5:
                raise ValueError("no more tensors")
            return kept(backend, tensors, names)

        with monkeypatch.context() as patch:
            patch.setattr(CpuBackend, "pack", pack)
            with pytest.raises(BadRequest, match="no more tensors"):
                llm.scheduler.update_weights(str(base))
        llm.load_adapter("some", str(adapters["some"][0]))
        (after,) = llm.generate([prompt], GREEDY, adapter="all")
        assert after.token_ids == before.token_ids
        assert count_matrices() == matrices


def count_matrices() -> int:
    gc.collect()
    return sum(type(one) is AdaptedMatrix for one in gc.get_objects())


def test_stored_prefixes_are_found_by_those_that_have_the_adapter(made, tmp_path):
    base, adapters = made("qwen2")
    (prompt,) = prompts_of([100])
    modules = tuple(f"{name}={folder}" for name, (folder, _) in adapters.items())
    options = {"lora_modules": modules, "enable_hierarchical_cache": True, "hicache_storage_backend": "file",
               "hicache_storage_location": str(tmp_path), **EXACT}  # fmt: skip
    with LLM(str(base), **options) as llm:
        (first,) = llm.generate([prompt], GREEDY, adapter="all")
        deadline = time.monotonic() + 20
        while llm.scheduler.memory.awaits_transfers and time.monotonic() < deadline:
            llm.scheduler.step()
    with LLM(str(base), **{**options, "hicache_storage_prefetch_policy": "wait_complete"}) as llm:
        for name in ("some", None, "all"):
            (output,) = llm.generate([prompt], GREEDY, adapter=name)
            assert output.cached_by_tier.get("storage", 0) == (96 if name == "all" else 0)
        assert output.token_ids == first.token_ids
