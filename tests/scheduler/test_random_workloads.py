"""Random workloads on the simulated engine: every read checked, every output compared with a cold run,
every page recounted after every step."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freehold.config import EVICTION_POLICIES, EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.scheduler.request import FinishKind
from freehold.simulation.assembly import SimulatedModel
from harness import Harness

PREFIXES = [list(range(start, start + 200)) for start in (0, 300, 600)]

prompts = st.builds(
    lambda which, cut, tail: PREFIXES[which][:cut] + tail,
    st.integers(0, 2),
    st.integers(0, 120),
    st.lists(st.integers(0, 999), min_size=1, max_size=40),
)
requests = st.builds(
    lambda prompt, max_tokens, ignore_eos, stop, namespace, priority, delay, abort: {
        "prompt": prompt,
        "params": SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop=("7><",) if stop else ()
        ),
        "namespace": namespace,
        "priority": priority,
        "delay": delay,
        "abort": abort,
    },
    prompts,
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "", "tenant"]),
    st.integers(0, 2),
    st.integers(0, 10),
    st.one_of(st.none(), st.none(), st.integers(0, 30)),
)
configs = st.builds(
    lambda page_size, chunk, overlap, policy, eviction, rows, tight, interval, cache, speculation: EngineConfig(
        page_size=page_size,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        schedule_policy=policy,
        eviction_policy=eviction,
        max_running_requests=rows,
        # 200 tokens: hardly more than the longest request, so that requests are retracted all the time.
        num_pages=-(-(200 if tight else 3000) // page_size),
        forward_retract_interval=interval,
        disable_radix_cache=not cache,
        speculative_algorithm=speculation,
        priority_scheduling_preemption_threshold=1 if policy == "priority" and overlap else None,
    ),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from([5, 16, 100]),
    st.booleans(),
    st.sampled_from(["fcfs", "lpm", "priority"]),
    st.sampled_from(EVICTION_POLICIES),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, "ngram", "draft"]),
)


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(configs, st.lists(requests, min_size=1, max_size=12))
def test_any_workload_ends_with_cold_run_outputs_and_all_pages_back(config, workload):
    harness = Harness(config, token_limit=512, model=SimulatedModel(eos_tokens=(3, 17, 401)))
    pending = sorted(enumerate(workload), key=lambda item: item[1]["delay"])
    aborts = {}
    for step in range(60):
        while pending and pending[0][1]["delay"] <= step:
            index, spec = pending.pop(0)
            harness.submit(spec["prompt"], spec["params"], f"r{index}", spec["namespace"], spec["priority"])
            if spec["abort"] is not None:
                aborts[f"r{index}"] = step + spec["abort"]
        for name in [name for name, when in aborts.items() if when == step]:
            harness.scheduler.abort(name)
        harness.step()
    ended = harness.run()
    assert {request.id for request in ended} == {f"r{i}" for i in range(len(workload))}
    for request in ended:
        assert request.finish is not None
        if request.id not in aborts:
            assert request.finish.kind in (FinishKind.STOP, FinishKind.LENGTH)
    harness.memory.flush()
    harness.memory.audit()
    assert harness.memory.counts().free == harness.memory.shape.page_count
