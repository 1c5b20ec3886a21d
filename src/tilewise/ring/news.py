"""How the loss of a rank becomes known to ranks that were not talking to it: whoever notices writes it down in the group's
store, once and for all, and whoever waits looks there."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from .._errors import PeerLost

LOST, LATE = "tilewise/ring/lost", "tilewise/ring/late"
LINGER_S = 0.5
"""How long the rank that holds the store stays when it knows of a loss, so that others can still read of it."""


class News:
    """What ranks of a group tell each other in its store. A store that does not answer is a loss like any other: of the
    process that held it, which is where everybody met (`host`, the group's rank of the world's first, or None)."""

    def __init__(self, store: Any, rank: int, host: int | None) -> None:
        self.store, self.rank, self.host = store, rank, host
        self._waiting = False

    def check(self, step: int) -> PeerLost | None:
        """The loss that somebody has noticed, if any."""
        try:
            return self._read(self.store.get(LOST)) if self.store.check([LOST]) else None
        except RuntimeError as error:
            return self._unreachable(self.host, step, error)

    def declare(self, lost: PeerLost) -> PeerLost:
        """Make a loss known, unless another one is already: the one that all ranks raise."""
        mine = json.dumps([lost.rank, lost.step, lost.why])
        try:
            first = self._read(self.store.compare_set(LOST, "", mine))
        except RuntimeError:
            return lost
        if self.rank == self.host:
            time.sleep(LINGER_S)
        return first

    def wait_for(self, peer: int) -> None:
        """Make known whom this rank has been waiting for some time."""
        self._waiting = True
        self._set(peer)

    def arrived(self) -> None:
        """Take that back."""
        if self._waiting:
            self._waiting = False
            self._set(-1)

    def blame(self, peer: int, step: int) -> PeerLost:
        """Whom to blame for having waited for `peer` too long: whoever it waits for in turn, and so on, to one who does not
        wait; or `peer`, where they wait for each other."""
        found, seen = peer, {self.rank}
        try:
            while found not in seen and self.store.check([f"{LATE}/{found}"]):
                seen.add(found)
                after = int(self.store.get(f"{LATE}/{found}"))
                if after < 0:
                    break
                found = after
        except RuntimeError as error:
            return self._unreachable(self.host, step, error)
        if found in seen and found == self.rank:
            return PeerLost(peer, step, "it waits for others which wait for it: ranks did not make the same calls")
        return PeerLost(found, step, "it sent nothing and took nothing until the deadline")

    def _set(self, peer: int) -> None:
        with suppress(RuntimeError):  # the next look at the news says so
            self.store.set(f"{LATE}/{self.rank}", str(peer))

    def _read(self, text: bytes | str) -> PeerLost:
        rank, step, why = json.loads(text)
        return PeerLost(rank, step, why)

    def _unreachable(self, host: int | None, step: int, error: RuntimeError) -> PeerLost:
        why = f"the store at which the ranks met does not answer: {first_line(error)}"
        return PeerLost(self.rank if host is None else host, step, why)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
