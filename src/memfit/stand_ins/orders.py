"""Orders in which sums are added up, and operators of which there is one for each order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

_NAME = re.compile(r"sums_of_(\d+)(?:_in_(\d+))?")


@dataclass(frozen=True)
class Order:
    """In which order products are added up.

    Attributes:
        num_summed: so many follow each other from zero, and are then added to the sum of those before: terms of a
            product, of a convolution channels, or for the gradient of its weight elements of a map. There, with
            windows of three by three, no sum begins anew.
        num_parts: for the gradient of a weight, in how many parts samples are added up; else 0.
    """

    num_summed: int
    num_parts: int = 0

    @property
    def name(self) -> str:
        """What an operator's overload is called that adds up so."""
        return f"sums_of_{self.num_summed}" + (f"_in_{self.num_parts}" if self.num_parts else "")

    @staticmethod
    def named(name: str) -> Order | None:
        """The order of that name, if it is one."""
        found = _NAME.fullmatch(name)
        return None if found is None else Order(int(found[1]), int(found[2] or 0))


class Family:
    """An operator with many stand-ins: called by itself, one for all shapes; its attributes are named after orders."""

    def __init__(self, usual: Callable[..., Any], in_order: Callable[..., Any]) -> None:
        self._usual = usual
        self._in_order = in_order

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._usual(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        order = Order.named(name)
        if order is None:
            raise AttributeError(f"{name} is no order of sums; those are named like {Order(16).name}.")
        function = partial(self._in_order, order)
        setattr(self, name, function)  # it is not asked for a second time
        return function
