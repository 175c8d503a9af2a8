"""What tests share: a garbage collector that does not walk over torch again and again, and ways to run kernels."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfit import stand_ins
from memfit.torch_internals import thread_team

_ISA, _WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX10_1_512"
_PRODUCT = "import torch; one = torch.ones(64, 64, dtype=torch.bfloat16); one @ one"


def pytest_configure() -> None:
    """Have oneDNN do without AMX on virtual machines that say they have it and do not run it.

    There a product of brain floats ends any process, eager's too. Workers inherit what is set here.
    """
    processor = Path("/proc/cpuinfo")
    if _ISA not in os.environ and processor.exists() and "amx_bf16" in processor.read_text():
        ran = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False)
        if ran.returncode < 0:
            os.environ[_ISA] = _WITHOUT_TILES


@pytest.fixture(autouse=True, scope="module")
def leave_out_what_is_old() -> None:
    """Captures collect garbage, and so do many tests. What was there before a module's tests is hardly ever any.

    A full collection takes 0.2 s and more with torch and all that earlier tests have cached, next to nothing without.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["avx2", "any machine", "new threads", "one thread"])
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels as they are compiled for this machine and for any, on torch's threads, on new ones, on one."""
    kernels, num_threads = stand_ins.kernels(), torch.get_num_threads()
    assert kernels is not None
    kernels.memfit_allow_avx2(request.param != "any machine")
    kernels.memfit_use_team(None if request.param == "new threads" else thread_team())
    torch.set_num_threads(1 if request.param == "one thread" else max(num_threads, 2))
    yield
    torch.set_num_threads(num_threads)
    kernels.memfit_allow_avx2(True)
    kernels.memfit_use_team(thread_team())
