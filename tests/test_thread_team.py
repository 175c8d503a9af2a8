"""Kernels in C share work out over torch's own threads, or over new ones; every item is done once either way."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfit.codecs.registry import codec
from memfit.native import library
from memfit.torch_internals import thread_team

needs_compiler = pytest.mark.skipif(library.native_library(library.CODECS) is None, reason="there is no C compiler")
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(params=["torch's threads", "new threads"])
def codecs(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The library as it runs on either kind of threads."""
    found = library.native_library(library.CODECS)
    assert found is not None
    if request.param == "new threads":
        found.memfit_use_team(None)
    yield found
    library.native_library(library.CODECS)  # gives it torch's again


def test_torch_computes_on_threads_that_can_be_given_work() -> None:
    if not torch.backends.openmp.is_available():
        pytest.skip("this torch was built without OpenMP")
    assert thread_team() is not None


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3, 64, 200])
@pytest.mark.parametrize(("count", "grain"), [(1, 1), (7, 1), (100, 8), (1000, 768), (1537, 768), (65, 1)])
def test_every_item_is_done_once(codecs: ctypes.CDLL, count: int, grain: int, num_threads: int) -> None:
    done: list[tuple[int, int]] = []
    run = WORK(lambda job, begin, end: done.append((begin, end)))
    codecs.memfit_share_out(run, None, ctypes.c_int64(count), ctypes.c_int64(grain), num_threads)
    times = Counter(item for begin, end in done for item in range(begin, end))
    assert times == dict.fromkeys(range(count), 1)
    assert all(begin % grain == 0 and begin < end for begin, end in done)
    assert len(done) <= min(num_threads, 64)


@needs_compiler
def test_more_than_one_thread_works(codecs: ctypes.CDLL) -> None:
    meeting = threading.Barrier(2, timeout=60)
    run = WORK(lambda job, begin, end: meeting.wait() and None)  # one alone would wait in vain
    codecs.memfit_share_out(run, None, ctypes.c_int64(2), ctypes.c_int64(1), 2)
    assert not meeting.broken


@needs_compiler
def test_codes_are_the_same_on_either(codecs: ctypes.CDLL) -> None:
    tensor = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3)).relu_()
    chosen = codec("fp10")
    code = chosen.encode(tensor, (0,))
    os.environ["MEMFIT_NATIVE"] = "0"
    try:
        assert torch.equal(code, chosen.encode(tensor, (0,)))
    finally:
        del os.environ["MEMFIT_NATIVE"]


@needs_compiler
def test_a_runtime_that_is_not_torchs_is_left_alone(tmp_path: Path) -> None:
    """A second OpenMP runtime beside torch's would have threads of its own, which nobody asked for."""
    script = """
import torch
from memfit import torch_internals
torch.__file__ = {path!r}
print(torch_internals.thread_team())
"""
    stray = tmp_path / "torch" / "lib"
    stray.mkdir(parents=True)
    (stray / "libgomp.so.1").write_bytes(b"not a library")
    script = script.format(path=str(tmp_path / "torch" / "__init__.py"))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["None"], ran.stderr
