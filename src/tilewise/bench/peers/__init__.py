"""Who is measured beside tilewise: one list. A peer is data, and adding one is adding a line."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from ..._errors import OptionError
from . import flash, flex, handmade, sdpa
from .peer import Peer as Peer
from .peer import contender as contender
from .peer import tilewise as tilewise

PEERS: tuple[Peer, ...] = (
    sdpa.of("sdpa"),
    sdpa.of("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    sdpa.of("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    sdpa.of("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
    handmade.FOLDED,
    handmade.LOOPED,
    flash.packed("sdpa-varlen", "torch.nn.attention.varlen"),
    flex.FLEX,
    flash.of("fa3", "fa3_fwd_interface", unbounded=-1, gradients=False),
    flash.of("fa4", "flash_attn.cute", unbounded=None),
)
"""Everyone who can be asked, in the order of the table's columns."""


def choose(names: str | None, device: str, quick: bool = False) -> tuple[Peer, ...]:
    """The peers named ("sdpa,flex", "all", "none"); if none is asked for, those that exist here, and if it shall be quick not
    those that compile first."""
    if names is None:
        return tuple(peer for peer in PEERS if not (quick and peer.slow_start) and not peer.absent(device))
    if names in ("all", "none"):
        return PEERS if names == "all" else ()
    known = {peer.name: peer for peer in PEERS}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise OptionError(f"peer {name!r} is unknown; there are {', '.join(known)}, all and none")
    return tuple(known[name] for name in dict.fromkeys(wanted))
