"""The codecs by name."""

from __future__ import annotations

from memfit.codecs.codec import Codec
from memfit.codecs.mask import Mask
from memfit.errors import BadOption

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Mask(),)}
NAMES = tuple(_CODECS)


def codec(name: str) -> Codec:
    """The codec of that name."""
    if name not in _CODECS:
        raise BadOption(f"codec {name!r}: unknown. Codecs: {', '.join(NAMES)}")
    return _CODECS[name]
