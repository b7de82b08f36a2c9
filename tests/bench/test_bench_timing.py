"""Calls take turns, in bursts and within their time."""

import torch

from rainfusion.bench import timing


class FakeClock:
    """Calls are numbers of milliseconds; it remembers which were made."""

    def __init__(self):
        self.made = []

    def milliseconds(self, calls):
        self.made.append(list(calls))
        return float(sum(calls))


def test_contenders_take_turns_within_their_time():
    clock = FakeClock()
    fast, slow = timing.take_turns([[10.0], [400.0]], clock, repeats=20, seconds=1.0)
    assert (fast.ms, fast.rounds) == (10.0, 20)
    assert (slow.ms, slow.rounds) == (400.0, 3)  # 1.2 s
    firsts = [calls[0] for calls in clock.made]
    turns = [sorted(firsts[-23:][i : i + 2]) for i in (0, 2, 4)]
    assert turns == [[10.0, 400.0]] * 3 and firsts[-17:] == [10.0] * 17
    (one,) = timing.take_turns([[5000.0]], FakeClock(), repeats=1, seconds=0.1)
    assert one.rounds == 1


def test_rounds_differ_in_their_order():
    clock = FakeClock()
    timing.take_turns([[float(ms)] for ms in (10, 20, 30, 40)], clock, repeats=10, seconds=1.0)
    firsts = [calls[0] for calls in clock.made][-40:]
    rounds = {tuple(firsts[i : i + 4]) for i in range(0, 40, 4)}
    assert all(sorted(turn) == [10.0, 20.0, 30.0, 40.0] for turn in rounds) and len(rounds) > 5


def test_short_calls_are_timed_in_bursts_over_all_inputs():
    clock = FakeClock()
    (timed,) = timing.take_turns([[0.1, 0.3]], clock, repeats=4, seconds=1.0)
    assert all(len(calls) >= 2.0 / 0.3 for calls in clock.made[1:])
    assert all({0.1, 0.3} == set(calls) for calls in clock.made[1:])
    assert 0.15 < timed.ms < 0.25
    assert timed.low_ms <= timed.ms <= timed.high_ms


def test_inputs_rotate_only_if_the_cache_would_hold_them():
    qkv = [torch.empty(1, 1, 1024, 128, dtype=torch.bfloat16)] * 3  # 0.75 MB
    assert timing.copies_needed(qkv, 0) == 1
    assert timing.copies_needed(qkv, 3 * 2**20 // 8) == 1
    assert timing.copies_needed(qkv, 2**20) == 4
    assert timing.copies_needed(qkv, 2**30) == 16
