"""Benchmarks that check before they time: interleaved with peers, in honest operations, with the rows we lose.

`cases` and `catalog` say what, `peers` against whom, `verify` whether it is right, `timing` how long; `run` brings a case from
check to rows, `report` tells it; `host` and `startup` measure what a call costs the computer."""

from .report import Report as Report
from .run import Setting as Setting
from .run import run as run
