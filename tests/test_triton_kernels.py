"""The codec kernels in Triton: equal to their twins in Triton's interpreter, and compilable for GPUs that are not here.

Triton chooses between interpreting and compiling when it is imported, and torch may have imported it before. So each is
a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another Python, one thread, with a cache of its own."""
    full = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache), **environment}
    return subprocess.run([sys.executable, *arguments], env=full, capture_output=True, text=True, timeout=500, cwd=HERE)


def run_tests(file: str, cache: Path, *options: str, **environment: str) -> None:
    plain = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
    ran = run(*plain, *options, str(HERE / file), cache=cache, **environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout.splitlines()[-1], ran.stdout


def test_every_kernel_is_its_twin_in_the_interpreter(tmp_path: Path) -> None:
    run_tests("triton_interpreted.py", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    run_tests("triton_compiled.py", tmp_path, "-k", "one_of_each", TRITON_INTERPRET="0", MEMFIT_TRITON_TARGET="cuda:80")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:75", "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_every_kernel_compiles_for_all_it_is_launched_with(tmp_path: Path, target: str) -> None:
    run_tests("triton_compiled.py", tmp_path, TRITON_INTERPRET="0", MEMFIT_TRITON_TARGET=target)


def test_cpu_tensors_never_import_triton(tmp_path: Path) -> None:
    script = """
import sys, torch
from memfit.codecs.registry import ALL_NAMES, codec
from memfit.codecs.samples import sample
for name in ALL_NAMES:
    drawn = sample(name, 1 << 14)
    code = codec(name).encode(drawn.tensor, drawn.settings)
    codec(name).decode(code, torch.empty_like(drawn.tensor), drawn.settings)
print([name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("memfit.codecs.triton")])
"""
    ran = run("-c", script, cache=tmp_path)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("how", "why"), [("", "active drivers"), ("import sys; sys.modules['triton'] = None", "import of triton halted")]
)
def test_where_triton_does_not_work_torch_does_it_and_says_so(tmp_path: Path, how: str, why: str) -> None:
    """Without a driver, and without Triton; as the first tensor on a GPU would find out."""
    script = f"""
{how}
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from memfit.codecs import kernels, mask
from memfit.codecs.registry import codec
kernels.is_for_triton = lambda tensor: True
x = torch.randn(1000)
for _ in range(2):
    code = codec("fp10").encode(x, (0,))
    gate = codec("mask").encode(x, (-float("inf"), 0.0, 0.0, 1.0))
print(kernels.can_run(x, kernels.Kernel.FP10_ENCODE), code.numel(), gate.numel())
"""
    ran = run("-c", script, cache=tmp_path, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert ran.stdout.split() == ["False", "1336", "125"], ran.stderr
    assert ran.stderr.count("codecs run in torch, not in Triton, on cpu: ") == 1
    assert why in ran.stderr
