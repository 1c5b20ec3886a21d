"""What a run found, as data: rows for a table and one JSON object that says where its numbers come from."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .machine import commit, machine, versions


class Line(Protocol):
    """A row of any record: what was found in one pass of one case."""

    @property
    def case(self) -> str: ...

    @property
    def name(self) -> str: ...

    def json(self) -> dict[str, object]: ...


R = TypeVar("R", bound=Line)


@dataclass(frozen=True)
class Row:
    """One measurement: `ours` and `peers` are rates in `unit`, more is better; a call does `work` of it. A refused row has no
    rates."""

    group: str
    case: str
    name: str
    regime: str
    unit: str
    work: float
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
        names = ("regime", "unit", "work", "ours", "peers", "spread", "error", "budget")
        rest = {key: getattr(self, key) for key in names}
        rest["error"] = rest["error"] if math.isfinite(self.error) else None
        return {"group": self.group, "case": self.case, "pass": self.name, **rest}


class Note(NamedTuple):
    """Why `who` was not measured in one pass of one case."""

    who: str
    case: str
    name: str
    reason: str


def provenance(command: str, date: str) -> dict[str, Any]:
    """What says where numbers come from: machine, versions, commit, date, command."""
    return {"machine": machine(), "versions": versions(), "commit": commit(), "date": date, "command": command}


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write(path: Path, found: dict[str, Any]) -> None:
    """One JSON object into a file, which holds either the old text or the new one, whenever it is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    os.replace(beside, path)


@dataclass
class Record(Generic[R]):
    """Rows and notes of a run, with what is needed to repeat it; `asked` and `done` count its cases."""

    command: str
    rows: list[R] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    asked: int = 0
    done: int = 0
    date: str = field(default_factory=now)

    def footnotes(self) -> list[str]:
        """Each reason once, with the cases it holds for; alone where it holds for all."""
        grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
        for note in self.notes:
            grouped.setdefault((note.who, note.reason), {}).setdefault(note.case, []).append(note.name)
        passes = {(line.case, line.name) for line in (*self.notes, *self.rows)}
        lines = []
        for (who, reason), cases in grouped.items():
            everywhere = len(passes) > 1 and sum(map(len, cases.values())) == len(passes)
            where = ", ".join(f"{case} {' and '.join(names)}" for case, names in cases.items())
            lines.append(f"{who} not measured{'' if everywhere else f' in {where}'}: {reason}")
        return lines

    def json(self) -> dict[str, Any]:
        """One object: provenance, how far the run came, rows, notes."""
        rows, notes = [row.json() for row in self.rows], self.footnotes()
        return {**provenance(self.command, self.date), "asked": self.asked, "done": self.done, "rows": rows, "notes": notes}

    def write(self, path: Path) -> None:
        write(path, self.json())


class Report(Record[Row]):
    """Rates of cases, ours beside those of peers."""

    @property
    def ok(self) -> bool:
        """True where something was measured and nothing was refused."""
        return bool(self.rows) and not any(row.refused for row in self.rows)

    def groups(self) -> dict[str, list[Row]]:
        """The rows by group, in order of appearance."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found

    def score(self, peer: str) -> tuple[int, int]:
        """Rows in which we are faster than `peer`, and slower."""
        ratios = [r for r in (row.ratio(peer) for row in self.rows) if r is not None]
        return sum(r >= 1 for r in ratios), sum(r < 1 for r in ratios)


def peers(rows: list[Row]) -> list[str]:
    """Every peer that was measured, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.peers))
