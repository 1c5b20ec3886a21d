"""Benchmarks that check before they time: interleaved with peers, in honest operations, with the rows we lose.

`cases` says what, `peers` against whom, `verify` whether it is right, `timing` how long, `report` how it is told."""

from .report import Report as Report
from .run import Setting as Setting
from .run import run as run
