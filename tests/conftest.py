import os

import pytest
import torch

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, which reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
