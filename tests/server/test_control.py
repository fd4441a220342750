"""Pausing, new weights, timeouts and explanations over HTTP."""

import json
import threading
import time

import httpx

from commands import run


def complete(url: str, **fields) -> httpx.Response:
    body = {"prompt": "One two three four", "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def post(url: str, path: str, **body) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def test_a_request_waits_behind_a_pause_and_is_answered_after_it(url):
    expected = complete(url).json()["choices"][0]["text"]
    for mode in ("in_place", "retract", "abort"):
        assert post(url, "/pause_generation", mode=mode).json()["status"] == "ok"
        answers = []
        thread = threading.Thread(target=lambda found=answers: found.append(complete(url)))
        thread.start()
        time.sleep(0.5)
        assert not answers
        assert httpx.get(f"{url}/health").status_code == 200
        assert "continued" in httpx.get(f"{url}/debug/memory").json()["waits_for"]
        assert post(url, "/continue_generation").json()["status"] == "ok"
        thread.join(30)
        assert answers[0].json()["choices"][0]["text"] == expected


def test_a_pause_in_the_middle_of_a_stream_changes_nothing(url):
    body = {"prompt": "Count: one two three", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    expected = complete(url, **body).json()["choices"][0]["text"]
    for mode in ("in_place", "retract"):
        text = ""
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
            for number, line in enumerate(response.iter_lines()):
                if number == 4:
                    post(url, "/pause_generation", mode=mode)
                    post(url, "/continue_generation")
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == expected


def test_a_wrong_mode_is_refused(url):
    answer = post(url, "/pause_generation", mode="later")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "mode"


def test_timeouts_answer_503(url):
    answer = complete(url, max_tokens=2000, ignore_eos=True, timeout=0.3)
    assert answer.status_code == 503
    assert "timed out after 0.3 s" in answer.json()["error"]["message"]
    assert complete(url, timeout=-1).status_code == 400


def test_weights_of_another_kind_are_refused_and_the_same_ones_flush_the_cache(url, checkpoint):
    prompt = "The same prompt again and again, to be found in the cache. " * 4
    complete(url, prompt=prompt)
    hit = complete(url, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit > 0
    refused = post(url, "/update_weights_from_disk", model_path="/nowhere/model.gguf")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model_path"
    assert post(url, "/update_weights_from_disk", model_path=str(checkpoint.path)).json()["success"] is True
    assert complete(url, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_why_a_prompt_misses_and_what_a_request_went_through(url):
    prompt = "A sentence that is long enough to fill more than one page of sixteen tokens, so that it can be cached."
    answer = complete(url, prompt=prompt).json()
    miss = post(url, "/debug/miss", prompt=prompt.replace("sixteen", "seventeen hundred")).json()
    assert miss["reason"] == "different"
    assert miss["common_tokens"] > 8
    assert miss["ours"] != miss["theirs"]
    story = httpx.get(f"{url}/debug/requests/{answer['id']}-0").json()
    assert story["finish"] == "length"
    assert story["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert {"waiting", "prefilling", "running"} <= set(story["seconds_in"])
    assert httpx.get(f"{url}/debug/requests/nobody").status_code == 404


def test_inspect_asks_the_same_questions(url):
    def inspect(*arguments: str) -> str:
        code, said = run("inspect", "--url", url, *arguments)
        assert code == 0, said
        return said

    answer = complete(url).json()
    assert "pages" in inspect()
    assert "page 3:" in inspect("--page", "3")
    assert "prompt tokens" in inspect("--request", f"{answer['id']}-0")
    assert "no sequence that continues" in inspect("--prompt", "zebra " * 40)
