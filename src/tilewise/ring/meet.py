"""Who carries the messages of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._errors import DtypeError
from .nccl import DeviceTransport
from .transport import Alone, GroupTransport, HostTransport, Transport

_alone: dict[torch.device, Alone] = {}
_open: dict[tuple[dist.ProcessGroup, torch.device], GroupTransport] = {}


def open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """The transport of a group for tensors of a device. It lives as long as the group."""
    if group is None or group.size() == 1:
        return _alone.setdefault(device, Alone())
    for key in [key for key in _open if key[0] not in distributed_c10d._world.pg_map]:
        _open.pop(key).close()
    if (group, device) not in _open:
        kind = device.type, backend_of(group, device)
        if kind == ("cpu", "gloo"):
            _open[group, device] = HostTransport(group, device)
        elif kind == ("cuda", "nccl"):
            _open[group, device] = DeviceTransport(group, device, between_hosts(group))
        else:
            have = kind[1] or "no backend"
            raise DtypeError(f"on {device} the process group has {have}; ring attention takes gloo on cpu and nccl on cuda")
    return _open[group, device]


def between_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself where it has Gloo beside NCCL; else one of the same ranks that has."""
    if backend_of(group, torch.device("cpu")) == "gloo":
        return group
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that a group has for a device; nothing where it has none."""
    try:
        return group._get_backend(device).name().lower()
    except RuntimeError:
        return ""
