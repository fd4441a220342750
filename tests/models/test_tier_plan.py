"""What names pages below the device: everything that their bytes depend on, and nothing else."""

from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
import pytest
from tiny_models import TINY_MODELS, save_random
from torch import float32

from freehold.config import EngineConfig
from freehold.contract.errors import InvalidParameter
from freehold.contract.orders import Kind, Order
from freehold.engine.page_mover import PageMover
from freehold.models.loading.content import content_fingerprint
from freehold.models.loading.resolve import open_checkpoint
from freehold.runtime import tier_plan
from freehold.runtime.memory_plan import plan_memory
from freehold.runtime.tier_plan import check_capacity, check_tiers, place_of, plan_tiers
from freehold.store.store import StoreStats

# Float32, because how attention rounds KV in bfloat16 depends on the machine, which would hide what depends on KV.
OPTIONS = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "kv_cache_dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random(TINY_MODELS["gemma3"].make_config(), 5, float32, path)
    return path


def names(folder, **options):
    """-> all that keys begin with."""
    config = EngineConfig(model=str(folder), **{**OPTIONS, **options})
    checkpoint = open_checkpoint(folder)
    plan = plan_tiers(config, checkpoint, plan_memory(config, checkpoint))
    return plan.identity, plan.group_keys


def test_names_are_the_same_after_a_restart_whatever_else_is_chosen(folder):
    expected = names(folder)
    assert names(folder) == expected
    others = {"num_pages": 500, "max_running_requests": 3, "hicache_ratio": 3.0, "schedule_policy": "lpm"}
    for name, value in others.items():
        assert names(folder, **{name: value}) == expected, name


@pytest.mark.parametrize("field", [
    {"kv_cache_dtype": "int8"}, {"page_size": 4}, {"page_size": 64}, {"linear_compute": "int8"},
    {"speculative_algorithm": "draft"}, {"speculative_algorithm": "draft", "speculative_draft_layers": 1},
], ids=str)  # fmt: skip
def test_each_option_that_changes_bytes_changes_the_names(field, folder):
    assert names(folder, **field)[0] != names(folder)[0]


def test_pages_of_attention_that_rounds_otherwise_have_another_name(folder, monkeypatch):
    """Instruction sets differ where KV is bfloat16, and only matrix registers do."""

    def found(isa, kind):
        monkeypatch.setattr(tier_plan, "choose", lambda _: isa)
        return names(folder, kv_cache_dtype=kind)[0]

    assert found("avx2", "bfloat16") == found("avx512-vnni", "bfloat16") != found("amx", "bfloat16")
    assert found("avx2", "float32") == found("amx", "float32")


def test_two_draft_models_have_two_names(folder):
    one, two = ({"speculative_algorithm": "draft", "speculative_draft_layers": layers} for layers in (1, 2))
    assert names(folder, **one)[0] != names(folder, **two)[0]


def test_the_format_is_part_of_the_name(folder, monkeypatch):
    before = names(folder)[0]
    monkeypatch.setattr(tier_plan, "FORMAT", tier_plan.FORMAT + 1)
    assert names(folder)[0] != before


def test_each_group_has_a_name_of_its_own(folder):
    _, groups = names(folder)
    assert len(groups) == len(set(groups)) == 2


@pytest.mark.parametrize("change", ["window", "rope"])
def test_the_layers_are_part_of_the_name(change, folder, tmp_path):
    """The same weights under another configuration."""
    config = TINY_MODELS["gemma3"].make_config()
    if change == "window":
        config.sliding_window += 1
    else:
        config.rope_parameters = {
            kind: {**fields, "rope_theta": 3 * fields["rope_theta"]} for kind, fields in config.rope_parameters.items()
        }
    save_random(config, 5, float32, tmp_path)
    (one, groups), (two, others) = names(folder), names(tmp_path)
    assert one != two
    if change == "window":
        assert groups != others


def test_weights_are_named_by_their_content(folder, tmp_path):
    save_random(TINY_MODELS["gemma3"].make_config(), 6, float32, tmp_path / "other")
    save_random(TINY_MODELS["gemma3"].make_config(), 5, float32, tmp_path / "same")
    assert content_fingerprint(tmp_path / "same") == content_fingerprint(folder)
    assert content_fingerprint(tmp_path / "other") != content_fingerprint(folder)
    file = tmp_path / "same" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert content_fingerprint(tmp_path / "same") != content_fingerprint(folder)


def test_host_memory_is_what_was_asked_for(folder):
    checkpoint = open_checkpoint(folder)
    config = EngineConfig(model=str(folder), num_pages=100, enable_hierarchical_cache=True, hicache_ratio=1.5)
    plan = plan_memory(config, checkpoint)
    tiers = plan_tiers(config, checkpoint, plan)
    assert tiers.page_counts == tuple(int(1.5 * count) for count in plan.shape.page_counts)
    sized = plan_tiers(replace(config, hicache_size=1 << 20), checkpoint, plan)
    total = sum(count * size for count, size in zip(sized.page_counts, plan.page_bytes, strict=True))
    assert 0.9 * (1 << 20) < total <= 1 << 20
    with pytest.raises(ValueError, match="hicache_size"):
        plan_tiers(replace(config, hicache_size=100), checkpoint, plan)
    assert plan_tiers(replace(config, enable_hierarchical_cache=False), checkpoint, plan) is None


@pytest.mark.parametrize(("options", "message"), [
    ({"hicache_storage_backend": "file"}, "needs enable_hierarchical_cache"),
    ({"hicache_storage_location": "kv"}, "hicache_storage_location needs hicache_storage_backend"),
    ({**OPTIONS, "hicache_storage_backend": "tape"}, "hicache_storage_backend must be one of"),
    ({**OPTIONS, "hicache_write_policy": "never"}, "hicache_write_policy must be one of"),
    ({**OPTIONS, "hicache_ratio": 0.0}, "hicache_ratio"),
])  # fmt: skip
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(("kind", "location"), [
    ("redis", None), ("s3", None), ("s3", "bucket"), ("s3", "redis://host"), ("file", "s3://bucket/c"), ("file", ""),
    ("redis", "/folder"), ("file", "tape://one"),
])  # fmt: skip
def test_a_location_of_another_kind_is_refused(kind, location, folder):
    with pytest.raises(InvalidParameter, match="hicache_storage_location: expected") as refused:
        place_of(kind, location)
    assert refused.value.field == "hicache_storage_location"
    options = {"hicache_storage_backend": kind, "hicache_storage_location": location}
    config = EngineConfig(model=str(folder), **{**OPTIONS, **options})
    with pytest.raises(InvalidParameter, match="hicache_storage_location: expected"):
        check_tiers(config, plan_memory(config, open_checkpoint(folder)))


@pytest.mark.parametrize(("kind", "location"), [
    ("file", "kv"), ("file", "/tmp/kv"), ("file", "file:///tmp/kv"), ("redis", "rediss://host/0"),
    ("redis", "unix:///socket"), ("s3", "s3://bucket/kv"),
])  # fmt: skip
def test_a_location_of_its_kind_stays_as_it_is(kind, location):
    assert place_of(kind, location) == location


def test_a_capacity_that_would_keep_nothing_is_refused(folder):
    check_capacity(4 * 300, [100, 200])
    with pytest.raises(InvalidParameter, match="hicache_storage_capacity: must be at least 1200") as refused:
        check_capacity(4 * 300 - 1, [100, 200])
    assert refused.value.field == "hicache_storage_capacity"
    with pytest.raises(InvalidParameter, match="hicache_storage_capacity"):
        names(folder, hicache_storage_capacity=10)


def test_without_a_prefix_cache_there_is_nothing_to_keep(folder):
    checkpoint = open_checkpoint(folder)
    config = EngineConfig(model=str(folder), enable_hierarchical_cache=True, disable_radix_cache=True)
    with pytest.raises(ValueError, match="disable_radix_cache"):
        plan_tiers(config, checkpoint, plan_memory(config, checkpoint))


@dataclass
class Page:
    """A device without anything."""

    page_bytes: int = 64

    def gather(self, pages, out, to): ...

    def scatter(self, pages, packed, at): ...


class WrongSizes:
    """A store whose second page is cut short, and whose third is missing."""

    def get(self, keys, deadline):
        return [memoryview(b"a" * 64), memoryview(b"b" * 63), None]

    def stats(self):
        return StoreStats(None, None, None)

    def close(self): ...


def test_a_page_of_another_size_is_a_miss():
    mover, outcomes = PageMover([Page()], [4], WrongSizes()), []
    order = Order(1, Kind.FETCH, [np.array([1, 2, 3], np.int32)], keys=[[b"1", b"2", b"3"]])
    mover.begin(order, outcomes.append)
    mover.wait(5)
    mover.shutdown()
    assert outcomes[0].whole[0].tolist() == [True, False, False]
    assert outcomes[0].error is None


def test_what_breaks_while_copying_is_reported():
    class Broken(Page):
        def scatter(self, pages, packed, at):
            if len(pages) > 1:
                raise RuntimeError("the device is gone")

    mover, outcomes = PageMover([Broken()], [4]), []
    pages = [np.array([1, 2], np.int32)]
    mover.begin(Order(1, Kind.LOAD, pages, pages, [[b"1", b"2"]]), outcomes.append)
    mover.wait(5)
    mover.shutdown()
    assert outcomes[0].whole[0].tolist() == [False, False]
    assert "the device is gone" in outcomes[0].error


class Panicking:
    """A store whose library panics: what it raises is no Exception."""

    def get(self, keys, deadline):
        raise BaseException("panicked")

    put = contains = get

    def close(self): ...


@pytest.mark.parametrize("kind", [Kind.FETCH, Kind.PROBE, Kind.STORE])
def test_an_order_ends_even_in_a_panic(kind):
    mover, outcomes = PageMover([Page()], [4], Panicking()), SimpleQueue()
    mover.begin(Order(1, kind, [np.array([1], np.int32)], keys=[[b"1"]]), outcomes.put)
    outcome = outcomes.get(timeout=10)
    mover.shutdown()
    assert outcome.whole[0].tolist() == [False]
    assert "panicked" in outcome.error
