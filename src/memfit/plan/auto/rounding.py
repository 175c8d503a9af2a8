"""Starts by rounding: the bound's optimum, which may split a storage between choices, made whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from memfit.plan.auto.sites import Site
from memfit.plan.bound.cut import Share
from memfit.plan.decisions import Decision, Encode, EncodeThenOffload, Keep, Offload, Recompute

_THRESHOLDS = (0.3, 0.5, 0.7)


def rounded_starts(sites: tuple[Site, ...], shares: Mapping[int, Share], tiers: tuple[str, ...]) -> Iterator[list[int]]:
    """Moves for every site, for each threshold from which a share counts as all of it."""
    seen: set[tuple[int, ...]] = set()
    for tier, away, again in product(tiers or ("",), _THRESHOLDS, _THRESHOLDS):
        moves = [_move(site, shares.get(site.storage), tier, away, again) for site in sites]
        if tuple(moves) not in seen:
            seen.add(tuple(moves))
            yield moves


def _move(site: Site, share: Share | None, tier: str, away: float, again: float) -> int:
    if share is None:
        return 0
    coded = next((move.decision for move in site.moves if isinstance(move.decision, Encode)), None)
    wanted: Decision = Keep()
    if coded is not None and share.encoded >= 0.5:
        wanted = EncodeThenOffload(coded.codec, tier) if share.away >= away else coded
    elif share.away >= away:
        wanted = Offload(tier)
    elif share.again >= again:
        wanted = Recompute()
    return site.number(wanted) or 0
