import os

import pytest
import torch

collect_ignore = ["conftest.py"]  # no doctests here, and several folders have a file of this name

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, which reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is off by a thousandth."""
    from tilewise import backends
    from tilewise.problem import Partial

    torch_backend = backends.load("torch")
    right = torch_backend.forward

    def off(*arguments):
        o, lse = right(*arguments)
        return Partial(o * 1.001, lse)

    monkeypatch.setattr(torch_backend, "forward", off)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
