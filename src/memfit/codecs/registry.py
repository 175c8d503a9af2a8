"""The codecs by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from memfit.codecs.bf16 import Bf16
from memfit.codecs.codec import Codec
from memfit.codecs.csr import Csr
from memfit.codecs.fp8 import Fp8
from memfit.codecs.fp10 import Fp10
from memfit.codecs.fp16 import Fp16
from memfit.codecs.int4 import Int4
from memfit.codecs.int8 import Int8
from memfit.codecs.mask import Mask
from memfit.codecs.narrow_int import NarrowInt
from memfit.codecs.sparse import Sparse
from memfit.codecs.sparse_float import SparseBf16, SparseFp8, SparseFp10, SparseFp16
from memfit.codecs.window import Window
from memfit.errors import BadOption

_LOSSLESS = (Mask, Window, Sparse, Csr, NarrowInt)
_LOSSY = (Fp16, Bf16, Fp10, Fp8, Int8, Int4, SparseFp16, SparseBf16, SparseFp10, SparseFp8)
_PLAIN: dict[str, Callable[[], Codec]] = {codec.name: codec for codec in (*_LOSSLESS, *_LOSSY)}
# Codecs that take a number behind their name, as in `sparse:0.5`, and what it is read as.
_WITH_OPTION: dict[str, Callable[[str], Codec]] = {
    "sparse": lambda text: Sparse(float(text)),
    "csr": lambda text: Csr(float(text)),
    "sparse-fp16": lambda text: SparseFp16(float(text)),
    "sparse-bf16": lambda text: SparseBf16(float(text)),
    "sparse-fp10": lambda text: SparseFp10(float(text)),
    "sparse-fp8": lambda text: SparseFp8(float(text)),
    "narrow-int": lambda text: NarrowInt(int(text)),
    "int8": lambda text: Int8(int(text)),
    "int4": lambda text: Int4(int(text)),
}

ALL_NAMES = tuple(_PLAIN)
LOSSLESS_NAMES = tuple(name for name in ALL_NAMES if not _PLAIN[name]().is_lossy)
LOSSY_NAMES = tuple(name for name in ALL_NAMES if name not in LOSSLESS_NAMES)


@functools.cache
def codec(name: str) -> Codec:
    """The codec of that name, which may end in an option: `sparse:0.5` reserves room for half of the elements."""
    base, _, option = name.partition(":")
    if base not in _PLAIN:
        raise BadOption(f"codec {base!r}: unknown. Codecs: {', '.join(ALL_NAMES)}")
    if base == name:
        return _PLAIN[base]()
    if base not in _WITH_OPTION:
        raise BadOption(f"codec {name!r}: '{base}' has no option. Options have: {', '.join(_WITH_OPTION)}")
    try:
        return _WITH_OPTION[base](option)
    except BadOption:
        raise
    except ValueError:
        raise BadOption(f"codec {name!r}: the option of '{base}' is a number, not {option!r}") from None
