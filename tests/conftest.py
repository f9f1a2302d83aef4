"""What every test gets: a device, and the same random numbers each time."""

from __future__ import annotations

import pytest
import torch

# The problems are small: more threads than one wait for each other more than they compute.
torch.set_num_threads(1)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device of this machine that fxfuse has code for."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
