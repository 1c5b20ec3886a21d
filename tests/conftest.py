import os
from typing import Any

import pytest
import torch

collect_ignore = ["conftest.py"]  # no doctests here, and several folders have a file of this name

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, which reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


LONG = ("test_triton_compile.py", "test_hopper_compile.py", "test_ring_gloo.py")
"""Files whose tests take minutes: first, so that no process is left with one of them in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is off by a thousandth."""
    from tilewise import backends

    for name in ("cpu", "torch"):
        _put_off(monkeypatch, backends.load(name))


def _put_off(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    from tilewise.problem import Partial

    right = backend.forward

    def off(*arguments):
        o, lse = right(*arguments)
        return Partial(o * 1.001, lse)

    monkeypatch.setattr(backend, "forward", off)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
