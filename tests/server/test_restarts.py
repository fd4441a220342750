"""How often and how soon an engine process is started again."""

from freehold.ipc.restarts import DELAY_MAX_S, DELAY_S, RECENT_S, WINDOW_S, Restarts


def test_the_limit_is_for_an_hour():
    restarts = Restarts(2)
    for at in (0.0, 1000.0):
        assert restarts.delay(at) is not None
        restarts.add(at)
    assert restarts.delay(2000.0) is None
    assert restarts.delay(WINDOW_S + 1) is not None
    assert restarts.count == 2
    assert Restarts(0).delay(0.0) is None


def test_those_that_follow_each_other_wait_longer():
    restarts, now, delays = Restarts(100), 0.0, []
    for _ in range(8):
        delays.append(restarts.delay(now))
        restarts.add(now)
        now += 1.0
    assert delays[:3] == [DELAY_S, 2 * DELAY_S, 4 * DELAY_S]
    assert delays[-1] == DELAY_MAX_S
    assert restarts.delay(now + RECENT_S) == DELAY_S
