"""The native API, field by field, through `requests`."""

import itertools
import json
import re
import threading
import time

import pytest
import requests


def generate(url, status=200, **body):
    fields = {"sampling_params": {"temperature": 0, "max_new_tokens": 8}, **body}
    answer = requests.post(f"{url}/generate", json=fields, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def message(url, **body) -> str:
    return generate(url, 400, **body)["error"]["message"]


def post(url, path, **body):
    return requests.post(f"{url}{path}", json=body, timeout=60)


def wait_for_running(url, count, state="running"):
    """Until so many requests decode."""
    end = time.monotonic() + 30
    while sum(lease["state"] == state for lease in requests.get(f"{url}/debug/memory").json()["leases"]) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_answer_of_one_prompt(url):
    answer = generate(url, text="The capital of France is", rid="mine")
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 8
    assert meta["prompt_tokens"] == 5
    assert set(meta) >= {"cached_tokens", "reasoning_tokens", "weight_version", "num_retractions", "e2e_latency"}
    ids = requests.post(f"{url}/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    same = generate(url, input_ids=ids)
    assert (same["text"], same["output_ids"]) == (answer["text"], answer["output_ids"])
    assert (
        requests.put(f"{url}/generate", json={"text": "A", "sampling_params": {"max_new_tokens": 1}}).status_code == 200
    )


def test_batches_and_samples(url):
    answers = generate(url, text=["One two", "Three four"], rid="b")
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1"]
    assert isinstance(generate(url, text=["One two"]), list)
    params = {"temperature": 0.9, "max_new_tokens": 4, "n": 2, "sampling_seed": 3}
    four = generate(url, text=["One two", "Three four"], sampling_params=params)
    assert len(four) == 4
    assert four[0]["meta_info"]["prompt_tokens"] == 2
    assert len(generate(url, text="One two", sampling_params=params)) == 2
    each = generate(url, text=["A", "B"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 3}])
    assert [len(answer["output_ids"]) for answer in each] == [1, 3]
    same = {"temperature": 1.0, "max_new_tokens": 6, "sampling_seed": 7}
    one, two = generate(url, text=["Once upon", "Once upon"], sampling_params=same)
    assert one["output_ids"] == two["output_ids"], "the seed and the prompt decide"


def test_stops(url):
    text = "Once upon a time there was a"
    whole = generate(url, text=text, sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True})
    stop, token = whole["text"][8:12], whole["output_ids"][3]
    params = {"temperature": 0, "max_new_tokens": 30, "stop": [stop]}
    stopped = generate(url, text=text, sampling_params=params)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    kept = generate(url, text=text, sampling_params={**params, "no_stop_trim": True})
    assert stop in kept["text"]
    assert whole["text"].startswith(kept["text"])
    params = {"temperature": 0, "max_new_tokens": 9, "stop_token_ids": [token, 10**8]}
    by_token = generate(url, text=text, sampling_params=params)
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert by_token["output_ids"] == whole["output_ids"][: whole["output_ids"].index(token) + 1]
    assert len(generate(url, text=text, sampling_params={**params, "ignore_eos": True})["output_ids"]) == 9


def test_no_new_tokens_caches_the_prompt(url):
    ids = list(range(1000, 1040))
    nothing = generate(url, input_ids=ids, sampling_params={"max_new_tokens": 0, "temperature": 0})
    assert nothing["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert (nothing["text"], nothing["output_ids"]) == ("", [])
    assert generate(url, input_ids=[*ids, 5])["meta_info"]["cached_tokens"] == 32


def test_streams_are_cumulative(url):
    body = {"text": "Count: one two three", "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.decode() for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    whole = generate(url, text=body["text"], sampling_params=body["sampling_params"])
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[0]["meta_info"]["prompt_tokens"] > 0
    batch = {**body, "text": ["One", "Two"]}
    with requests.post(f"{url}/generate", json=batch, stream=True, timeout=60) as response:
        indices = {json.loads(line[6:])["index"] for line in response.iter_lines() if line.startswith(b"data: {")}
    assert indices == {0, 1}


def test_logprobs_of_output(url):
    answer = generate(url, text="The capital", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 8
    for entry, top, token in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], answer["output_ids"], strict=True
    ):
        assert entry[1] == token
        assert entry[:2] == top[0][:2], "greedy: the very same float as the top entry"
        assert isinstance(entry[2], str)
    assert meta["input_token_logprobs"] == []
    assert "output_token_logprobs" not in generate(url, text="A")["meta_info"]


def test_what_is_refused(url):
    assert "exactly one" in message(url)
    assert "exactly one" in message(url, text="a", input_ids=[1])
    assert "at least one prompt" in message(url, text=[])
    assert "sampling_params" in message(url, text="a", sampling_params={"max_tokens": 3})
    assert "top_p" in message(url, text="a", sampling_params={"top_p": 2})
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        assert name in message(url, text="a", sampling_params={name: "(x"})
        assert generate(url, text="a", sampling_params={name: "", "max_new_tokens": 1})
    assert "vocabulary" in message(url, input_ids=[10**8])
    assert "empty" in message(url, input_ids=[])
    assert "context length" in message(url, input_ids=[5] * 9000)
    assert "top_logprobs_num" in message(url, text="a", return_logprob=True, top_logprobs_num=99)
    assert "equal" in message(url, text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}])
    assert "entries" in message(url, text=["a", "b"], rid=["x"])
    assert generate(url, text="a", unknown_field=1, lora_path="", model="any")


def test_request_ids_in_flight_and_aborts_by_prefix(url):
    answers = {}

    def run(rid):
        params = {"max_new_tokens": 1500, "ignore_eos": True}
        answers[rid] = requests.post(
            f"{url}/generate", json={"text": "Go", "rid": rid, "sampling_params": params}
        ).json()

    threads = [threading.Thread(target=run, args=(rid,)) for rid in ("job-1", "job-2", "other")]
    for thread in threads:
        thread.start()
    wait_for_running(url, 3)
    assert "already in flight" in message(url, text="a", rid="job-1")
    assert post(url, "/abort_request", rid="").status_code == 200
    assert post(url, "/abort_request", rid="nobody").status_code == 200
    assert post(url, "/abort_request", rid="job").text == ""
    for thread in threads[:2]:
        thread.join(10)
    for rid in ("job-1", "job-2"):
        assert answers[rid]["meta_info"]["finish_reason"]["type"] == "abort"
        assert answers[rid]["meta_info"]["finish_reason"]["message"] == "Aborted"
        assert answers[rid]["output_ids"]
    assert "other" not in answers
    post(url, "/abort_request", abort_all=True)
    threads[2].join(10)
    assert answers["other"]["meta_info"]["finish_reason"]["type"] == "abort"


def test_queued_aborts_and_flushing_during_a_pause(url):
    assert post(url, "/pause_generation", mode="retract").json()["status"] == "ok"
    answers = []
    thread = threading.Thread(target=lambda: answers.append(generate(url, text="Wait", rid="queued")))
    thread.start()
    time.sleep(0.4)  # it is in the queue
    assert requests.post(f"{url}/flush_cache").status_code == 200, "the queue behind a pause does not block"
    assert requests.get(f"{url}/health_generate").status_code == 200
    post(url, "/abort_request", rid="queued")
    thread.join(10)
    assert answers[0]["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert answers[0]["output_ids"] == []
    post(url, "/continue_generation")
    assert requests.get(f"{url}/flush_cache").status_code == 200


def test_flushing_while_busy(url):
    params = {"max_new_tokens": 300, "ignore_eos": True}
    thread = threading.Thread(target=lambda: generate(url, text="Busy", sampling_params=params))
    thread.start()
    wait_for_running(url, 1)
    assert requests.post(f"{url}/flush_cache").status_code == 400
    assert requests.post(f"{url}/flush_cache", params={"timeout": 60}).status_code == 200
    thread.join()


def open_session(url, **fields):
    answer = post(url, "/open_session", **{"capacity_of_str_len": 1000, "streaming": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_streaming_sessions(url):
    session = open_session(url)
    assert isinstance(session, str)
    history = 0
    for i in range(3):
        answer = generate(url, input_ids=[504 + i, 7235, 314, 28], session_params={"id": session})
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == history + 4
        if history:
            assert history - 1 <= meta["cached_tokens"] <= history
        history = meta["prompt_tokens"] + meta["completion_tokens"]
    for field, value in (("offset", 3), ("replace", True), ("drop_previous_output", True)):
        assert field in message(url, text="x", session_params={"id": session, field: value})
    assert generate(url, text="x", session_params={"id": session, "offset": 0, "rid": "whatever"})
    assert post(url, "/open_session", capacity_of_str_len=1, session_id=session, streaming=True).status_code == 400
    assert post(url, "/close_session", session_id=session).text == ""
    assert "does not exist" in message(url, text="x", session_params={"id": session})
    assert post(url, "/close_session", session_id="nobody").status_code == 200
    assert generate(url, text="x", session_params={"id": None})


def test_a_second_turn_and_an_aborted_turn(url):
    session = open_session(url, session_id="talk")
    assert session == "talk"
    first = generate(url, input_ids=[504, 7235], session_params={"id": "talk"})["meta_info"]
    answers = []
    params = {"max_new_tokens": 1500, "ignore_eos": True}

    def run():
        answers.append(
            generate(url, input_ids=[9, 9, 9], rid="turn", session_params={"id": "talk"}, sampling_params=params)
        )

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_running(url, 1)
    assert "already has an active request" in message(url, text="x", session_params={"id": "talk"})
    assert post(url, "/close_session", session_id="elsewhere").status_code == 200
    post(url, "/abort_request", rid="turn")
    thread.join(10)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    after = generate(url, input_ids=[5], session_params={"id": "talk"})["meta_info"]
    assert after["prompt_tokens"] == first["prompt_tokens"] + first["completion_tokens"] + 1
    post(url, "/close_session", session_id="talk")


def test_branching_sessions(url):
    session = open_session(url, streaming=False)
    root = generate(url, input_ids=[504, 7235, 314], rid="root", session_params={"id": session})
    total = 3 + len(root["output_ids"])
    one = generate(url, input_ids=[28], rid="one", session_params={"id": session, "rid": "root"})
    assert one["meta_info"]["prompt_tokens"] == total + 1
    two = generate(url, input_ids=[30], session_params={"id": session, "rid": "root", "offset": 2})
    assert two["meta_info"]["prompt_tokens"] == 3
    three = generate(url, input_ids=[30], session_params={"id": session, "rid": "root", "drop_previous_output": True})
    assert three["meta_info"]["prompt_tokens"] == 4
    assert "not one of" in message(url, input_ids=[1], session_params={"id": session, "rid": "nobody"})
    for replaced in (None, "root"):
        params = {"id": session, "rid": replaced, "replace": True}
        assert "context length" in message(url, input_ids=[5] * 9000, session_params=params), "nothing was replaced"
    generate(url, input_ids=[1], session_params={"id": session, "rid": "one"})
    generate(url, input_ids=[1], session_params={"id": session, "rid": "root", "replace": True})
    assert "not one of" in message(url, input_ids=[1], session_params={"id": session, "rid": "one"})
    post(url, "/close_session", session_id=session)


def test_information(url):
    for path in ("/server_info", "/get_server_info"):
        info = requests.get(f"{url}{path}").json()
        assert info["page_size"] == 16
        assert info["disable_radix_cache"] is False
        assert isinstance(info["internal_states"], list)
    for path in ("/model_info", "/get_model_info"):
        assert requests.get(f"{url}{path}").json()["is_generation"] is True
    assert requests.get(f"{url}/health_generate").status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/open_session", "/abort_request", "/pause_generation"])
def test_broken_bodies_are_400(url, path):
    answer = requests.post(f"{url}{path}", data="{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert answer.json()["object"] == "error"


def test_logprobs_of_the_prompt(url):
    text = "The capital of France is Paris, and the capital of Italy is Rome"
    ask = {"text": text, "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [1, 2]}
    ids = requests.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    for start in (0, 3, len(ids) - 1, len(ids)):
        meta = generate(url, **ask, logprob_start_len=start)["meta_info"]
        count = len(ids) - start
        assert meta["cached_tokens"] <= start
        for field in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
            assert len(meta[field]) == count
        assert [entry[1] for entry in meta["input_token_logprobs"]] == ids[start:]
        if count:
            assert meta["input_token_logprobs"][0][0] is None
            assert meta["input_top_logprobs"][0] is None
        for entry, top, probes in list(
            zip(
                meta["input_token_logprobs"],
                meta["input_top_logprobs"],
                meta["input_token_ids_logprobs"],
                strict=True,
            )
        )[1:]:
            assert top[0][0] >= top[1][0]
            assert entry[0] <= top[0][0]
            assert [probe[1] for probe in probes] == [1, 2]
        assert len(meta["output_token_ids_logprobs"]) == meta["completion_tokens"]
    none = generate(url, **ask)["meta_info"]
    assert none["input_token_logprobs"] == []
    chosen = none["output_token_logprobs"][0][0]
    assert chosen == none["output_top_logprobs"][0][0][0], "the very same float"
    batch = generate(url, **{**ask, "text": [text, "Short"]}, logprob_start_len=[0, -1])
    assert [len(one["meta_info"]["input_token_logprobs"]) for one in batch] == [len(ids), 0]
    nothing = {"temperature": 0, "max_new_tokens": 0}
    scored = generate(url, **ask, logprob_start_len=0, sampling_params=nothing)
    assert scored["output_ids"] == []
    assert len(scored["meta_info"]["input_token_logprobs"]) == len(ids)
    assert len(scored["meta_info"]["output_token_logprobs"]) == 1
    refused = {**ask, "return_logprob": True}
    assert "logprob_start_len" in message(url, **refused, logprob_start_len=len(ids) + 1)
    assert "vocabulary" in message(url, **{**refused, "token_ids_logprob": [10**7]})


def test_prompt_logprobs_in_a_stream_come_with_the_first_event(url):
    body = {"text": "One two three", "return_logprob": True, "logprob_start_len": 0, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
    for line in lines:
        assert len(json.loads(line)["meta_info"]["input_token_logprobs"]) == 3


def test_stop_regex(url):
    text = "Once upon a time there was a"
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    whole = generate(url, text=text, sampling_params=params)["text"]
    stopped = generate(url, text=text, sampling_params={**params, "stop_regex": r"[,.]\s"})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"[,.]\s"}
    assert stopped["text"] == whole[: re.search(r"[,.]\s", whole).start()]
    kept = generate(url, text=text, sampling_params={**params, "stop_regex": [r"[,.]\s"], "no_stop_trim": True})
    assert kept["text"].startswith(stopped["text"])
    assert len(kept["text"]) > len(stopped["text"])
    assert "stop_regex" in message(url, text=text, sampling_params={"stop_regex": "("})
    body = {"text": text, "sampling_params": {**params, "stop_regex": r"[,.]\s"}, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
    assert all(stopped["text"].startswith(json.loads(line)["text"]) for line in lines)


def test_what_stopped_it_is_in_the_text_only_if_asked_for(url):
    text = "Once upon a time there was a"
    params = {"temperature": 0, "max_new_tokens": 12}
    whole = generate(url, text=text, sampling_params={**params, "ignore_eos": True})
    token = whole["output_ids"][3]
    piece = requests.post(f"{url}/detokenize", json={"tokens": [token]}).json()["prompt"]
    before = requests.post(f"{url}/detokenize", json={"tokens": whole["output_ids"][:3]}).json()["prompt"]
    for skip in (True, False):
        stops = {**params, "stop_token_ids": [token], "skip_special_tokens": skip}
        assert generate(url, text=text, sampling_params=stops)["text"] == before
        kept = generate(url, text=text, sampling_params={**stops, "no_stop_trim": True})
        assert kept["text"] == before + piece
        body = {"text": text, "sampling_params": stops, "stream": True}
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
        assert json.loads(lines[-1])["text"] == before, "nor has a stream shown it"


def test_a_timeout_in_a_stream_is_a_reason_to_finish(url):
    params = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    body = {"text": "Once", "sampling_params": params, "stream": True, "timeout": 4}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    last = json.loads(lines[-2])
    reason = last["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert len(last["output_ids"]) > 1
    refused = requests.post(f"{url}/generate", json={**body, "stream": False, "timeout": 0.5}, timeout=60)
    assert refused.status_code == 503
    assert refused.json()["object"] == "error"


@pytest.mark.parametrize("streaming", [True, False])
def test_a_turn_with_a_wrong_number_leaves_no_busy_mark(url, streaming):
    name = post(url, "/open_session", capacity_of_str_len=1000, streaming=streaming).json()
    turn = {"text": "Hello", "session_params": {"id": name}}
    wrong = {"max_new_tokens": 2, "min_new_tokens": -1}
    assert "min_tokens" in message(url, **turn, sampling_params=wrong)
    assert len(generate(url, **turn)["output_ids"]) > 0
    post(url, "/close_session", session_id=name)
