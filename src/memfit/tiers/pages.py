"""Memory as the disk wants it: whole pages, seen without copying."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

from memfit.tiers.spill_file import BLOCK_BYTES

_PY_BUFFER_READ, _PY_BUFFER_WRITE = 0x100, 0x200  # CPython's object.h
_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_of_memory.restype = ctypes.py_object


def down(num_bytes: int) -> int:
    """The last block boundary up to there."""
    return num_bytes - num_bytes % BLOCK_BYTES


def up(num_bytes: int) -> int:
    """The first block boundary from there on."""
    return down(num_bytes + BLOCK_BYTES - 1)


def memory_at(address: int, num_bytes: int, *, is_writable: bool = False) -> memoryview:
    """The memory at an address, which somebody else must keep alive."""
    return _view_of_memory(address, num_bytes, _PY_BUFFER_WRITE if is_writable else _PY_BUFFER_READ)


def empty_pages(num_bytes: int, offset: int) -> torch.Tensor:
    """A flat tensor of bytes that begins so far into pages of its own, which go when the tensor goes.

    Private and advised huge: fresh pages are what costs, and shared ones cost eight times as much.
    """
    length = -(-(offset + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=offset)


def padding_bytes(num_bytes: int) -> int:
    """The most that such pages are larger than the tensor in them."""
    page = max(mmap.PAGESIZE, BLOCK_BYTES)
    return -(-(BLOCK_BYTES - 1 + num_bytes) // page) * page - num_bytes if num_bytes else 0
