"""What must be left of all clients when they have gone: nothing."""

import time

import httpx


def check_nothing_is_left(url: str) -> None:
    """As soon as the server is healthy: close all sessions, flush, and count the pages. The administrator's key is
    'root'."""
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer root"}, timeout=60) as client:
        for _ in range(600):
            if client.get("/health").status_code == 200:
                break
            time.sleep(0.1)
        for session in client.get("/v1/sessions").json()["data"]:
            assert client.delete(f"/v1/sessions/{session['id']}").json()["deleted"] is True
        assert client.post("/flush_cache", params={"timeout": 30}).status_code == 200
        memory = client.get("/debug/memory").json()
    if "tiers" in memory:
        check_tiers(memory["tiers"])
    assert memory["leases"] == []
    assert memory["waiting"] == 0
    assert memory["pages"]["free"] == memory["pages"]["capacity"]


def check_tiers(tiers: dict) -> None:
    """Of a flushed cache: the host is empty, and nothing is under way."""
    for pages in tiers["host_pages"].values():
        assert pages["free"] == pages["capacity"], pages
    assert not any(tiers["queued_pages"].values()), tiers
    assert not any(counts["in_flight"] for counts in tiers["transfers"].values()), tiers
