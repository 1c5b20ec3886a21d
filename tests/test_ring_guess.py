"""Messages of a call that is not agreed on yet, and what watches messages between devices. What becomes of such calls on many
ranks: `ring_guesses`."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tilewise.ring import meet
from tilewise.ring.nccl import DeviceTransport, Watched
from tilewise.ring.news import News
from tilewise.ring.transport import Alone, Handle, Held, _Job, _Waiter, begun, run_steps


class Recorder(Alone):
    """Keeps what is posted, in order; a mark is how many marks there were before."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[Any, ...]] = []
        self.marks = 0
        self.given_up: BaseException | None = None

    def mark(self) -> Any:
        self.marks += 1
        return self.marks

    def post(self, step: int, sends: Any, recvs: Any, after: Any = None) -> Handle:
        self.posted.append((step, list(sends), list(recvs), after))
        return Handle(step, [(1, f"work {step}")], after)

    def give_up(self, error: BaseException) -> None:
        self.given_up = error


def test_held_messages_go_out_in_order_behind_their_marks():
    transport: Any = Recorder()
    held: Any = Held(transport)
    handles = [held.post(step, [(1, f"sent {step}")], []) for step in (0, 1, 2)]
    assert transport.posted == [] and [handle.works for handle in handles] == [[], [], []]
    held.release()
    assert transport.posted == [(step, [(1, f"sent {step}")], [], step + 1) for step in (0, 1, 2)]
    assert [handle.works for handle in handles] == [[(1, f"work {step}")] for step in (0, 1, 2)]
    after = held.post(3, [], [(1, "room")])
    assert transport.posted[3:] == [(3, [], [(1, "room")], None)] and after.works == [(1, "work 3")]


def steps(log: list[str], waits: int) -> Generator[Handle, None, str]:
    for at in range(waits):
        log.append(f"before {at}")
        yield Handle(at, [])
    log.append("end")
    return "result"


@pytest.mark.parametrize("waits", [0, 1, 3])
def test_a_call_goes_ahead_to_its_first_wait(waits):
    transport: Any = Recorder()
    log: list[str] = []
    rest = begun(steps(log, waits), transport)
    assert log == (["before 0"] if waits else ["end"])
    assert run_steps(rest, transport, 1.0) == "result"
    assert log == [*(f"before {at}" for at in range(waits)), "end"]


def test_a_rank_that_fails_ahead_tells_the_others():
    def broken() -> Generator[Handle, None, None]:
        raise ZeroDivisionError
        yield

    transport: Any = Recorder()
    with pytest.raises(ZeroDivisionError):
        begun(broken(), transport)
    assert isinstance(transport.given_up, ZeroDivisionError)


dist: Any = torch.distributed


def watching(starting: Watched | None, under_way: list[Watched], store: Any) -> DeviceTransport:
    """A transport of rank 0 as its watching thread sees it."""
    made = DeviceTransport.__new__(DeviceTransport)
    made.news, made._wake = News(store, 0, None), threading.Condition()
    made._starting, made._under_way = starting, under_way
    return made


class Event:
    """What a device has come to, or not."""

    def __init__(self, come: bool) -> None:
        self.come = come

    def query(self) -> bool:
        return self.come

    is_completed = query


def sent(begun: float, ready: bool = True, done: bool = False) -> Watched:
    return Watched(Handle(3, [(2, Event(done))], Event(ready)), 5.0, begun)


def test_what_takes_too_long_is_blamed_on_the_peer():
    now = time.monotonic()
    late, fresh = sent(now - 6), sent(now - 1)
    store = dist.HashStore()
    for starting, under_way in ((late, []), (None, [late]), (late, [fresh]), (None, [sent(now - 9, done=True), late])):
        lost = watching(starting, under_way, store)._look()
        assert lost is not None and (lost.rank, lost.step) == (2, 3)
    for starting, under_way in ((None, []), (fresh, []), (None, [fresh]), (None, [sent(now - 6, ready=False)])):
        assert watching(starting, under_way, store)._look() is None


def test_bad_news_ends_a_wait_at_once():
    store, now = dist.HashStore(), time.monotonic()
    other = News(store, 1, None).blame(2, 0)
    News(store, 1, None).declare(other)
    for starting, under_way in ((sent(now), []), (None, [sent(now, ready=False)])):
        lost = watching(starting, under_way, store)._look()
        assert str(lost) == str(other)


def test_messages_count_from_when_a_device_comes_to_them():
    watched = sent(0.0, ready=False)
    transport = watching(None, [watched], dist.HashStore())
    assert transport._look() is None and watched.begun == 0
    watched.handle.ready.come = True
    assert transport._look() is None and watched.begun > 0


def test_every_device_has_its_own_settings_without_a_group():
    one, other = (meet.open_transport(None, torch.device(name)) for name in ("cpu", "meta"))
    assert one is not other and one is meet.open_transport(None, torch.device("cpu"))
    assert isinstance(one, Alone) and one.agreed is not other.agreed


def test_what_goes_the_other_way_for_the_first_time_is_watched():
    """Sending to a rank and receiving from it are connected one by one."""
    transport: Any = object.__new__(DeviceTransport)
    transport.lost, transport.calls, transport.deadline_s, transport.device = None, 0, 1.0, "cpu"
    transport._talked, transport._starting, transport._wake = set(), None, threading.Condition()
    transport.mark, transport._behind = lambda: None, lambda after: nullcontext()
    watched: list[bool] = []
    transport._start = lambda sends, recvs, tag: watched.append(transport._starting is not None) or []
    x = torch.zeros(1)
    for sends, recvs in (([1], [2]), ([1], [2]), ([2], [1]), ([1, 2], [1, 2])):
        transport.post(0, [(peer, x) for peer in sends], [(peer, x) for peer in recvs])
    assert watched == [True, False, True, False]


@pytest.mark.parametrize("error", [RuntimeError("no way there"), ValueError("no such rank")])
def test_a_thread_that_cannot_start_a_message_says_so_and_goes_on(error: Exception):
    waiter = _Waiter()

    def fails() -> Any:
        raise error

    first = waiter.submit(_Job(0, fails, 1.0, 3))
    assert first.done.wait(5) and first.error is error and waiter.peer == 3
    second = waiter.submit(_Job(1, list, 1.0, 2))
    assert second.done.wait(5) and second.error is None
