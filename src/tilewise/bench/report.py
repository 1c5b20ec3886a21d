"""What a run found, as data: rows for a table and one JSON object that says where its numbers come from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from .machine import commit, machine, versions


@dataclass(frozen=True)
class Row:
    """One measurement: `ours` and `peers` are rates in `unit`, more is better. A refused row has no rates."""

    case: str
    name: str
    regime: str
    unit: str
    ours: float | None
    peers: dict[str, float]
    spread: float | None
    error: float
    budget: float

    @property
    def refused(self) -> bool:
        """True where the result was wrong, so nothing was timed."""
        return self.ours is None

    def ratio(self, peer: str) -> float | None:
        """Our speed over this peer's; None where either was not measured."""
        return None if self.ours is None or peer not in self.peers else self.ours / self.peers[peer]

    def json(self) -> dict[str, object]:
        """The row as JSON names it; an error that is no number is null."""
        rest = {key: getattr(self, key) for key in ("regime", "unit", "ours", "peers", "spread", "error", "budget")}
        rest["error"] = rest["error"] if math.isfinite(self.error) else None
        return {"case": self.case, "pass": self.name, **rest}


class Note(NamedTuple):
    """Why `who` was not measured in one pass of one case."""

    who: str
    case: str
    name: str
    reason: str


@dataclass
class Report:
    """Rows and notes of a run, with what is needed to repeat it."""

    command: str
    rows: list[Row] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def ok(self) -> bool:
        """True where something was measured and nothing was refused."""
        return bool(self.rows) and not any(row.refused for row in self.rows)

    def peers(self) -> list[str]:
        """Every peer that was measured, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.peers))

    def score(self, peer: str) -> tuple[int, int]:
        """Rows in which we are faster than `peer`, and slower."""
        ratios = [r for r in (row.ratio(peer) for row in self.rows) if r is not None]
        return sum(r >= 1 for r in ratios), sum(r < 1 for r in ratios)

    def footnotes(self) -> list[str]:
        """Each reason once, with the cases it holds for."""
        grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
        for note in self.notes:
            grouped.setdefault((note.who, note.reason), {}).setdefault(note.case, []).append(note.name)
        where = {
            key: ", ".join(f"{case} {' and '.join(names)}" for case, names in cases.items()) for key, cases in grouped.items()
        }
        return [f"{who} not measured in {where[who, reason]}: {reason}" for who, reason in grouped]

    def json(self) -> str:
        """One object: machine, versions, commit, date, command, rows."""
        found = {"machine": machine(), "versions": versions(), "commit": commit(), "date": self.date, "command": self.command}
        return json.dumps({**found, "rows": [row.json() for row in self.rows]}, indent=1, allow_nan=False)
