"""What the rows of the peers say about auto: exact, within its budget, fast enough, faster than every peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memfit.report.peers import Row
from memfit.report.peers_setting import AUTO, EAGER

MOST_TIME_RATIO = 1.10
"""Over eager, at half of its activation peak: what we promise."""


@dataclass(frozen=True)
class PeerVerdict:
    """How auto did on one network at one share of eager's activation peak; None is what could not be told.

    Attributes:
        within_budget: activations within the share, and the whole step within the budget it was planned for.
        fast_enough: at most MOST_TIME_RATIO over eager.
        fastest: no other peer within the same target takes less time, exact or not: beside auto where they were timed
            in turn, else beside eager.
        beaten_by: those that do, or take as long.
        within_noise: those of them whose quartiles leave that open: another run may order them otherwise.
        not_within: peers that no setting brought within the target.
        inexact: peers within the target whose steps were not eager's bit for bit.
        failed: peers that could not be measured.
    """

    network: str
    share: float
    exact: bool | None
    within_budget: bool | None
    time_ratio: float | None
    fast_enough: bool | None
    fastest: bool | None
    beaten_by: tuple[str, ...]
    within_noise: tuple[str, ...]
    not_within: tuple[str, ...]
    inexact: tuple[str, ...]
    failed: tuple[str, ...]
    note: str = ""

    @property
    def holds(self) -> bool:
        """True if all that is promised was shown."""
        return all((self.exact, self.within_budget, self.fast_enough, self.fastest))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def verdicts(rows: Sequence[Row]) -> list[PeerVerdict]:
    """A verdict for each network and share at which auto was among the peers."""
    return [_verdict(row, _others(row, rows)) for row in rows if row.peer == AUTO]


def _others(auto: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows that auto is held against: not eager, which is not within any share."""
    cell = (auto.network, auto.share)
    return [row for row in rows if (row.network, row.share) == cell and row.peer not in (AUTO, EAGER)]


def _verdict(auto: Row, others: Sequence[Row]) -> PeerVerdict:
    ratio = auto.time_ratio
    within = [row for row in others if row.within and row.time_ratio is not None]
    beaten_by = [row for row in within if ratio is not None and _over(auto, row) >= 1]
    return PeerVerdict(
        network=auto.network,
        share=auto.share,
        exact=auto.exact,
        within_budget=None if auto.trial is None else auto.within and auto.within_budget is not False,
        time_ratio=ratio,
        fast_enough=None if ratio is None else ratio <= MOST_TIME_RATIO,
        fastest=None if ratio is None else auto.within and not beaten_by,
        beaten_by=tuple(row.peer for row in beaten_by),
        within_noise=tuple(row.peer for row in beaten_by if _is_open(row, auto)),
        not_within=tuple(row.peer for row in others if row.trial is not None and not row.within),
        inexact=tuple(row.peer for row in within if row.exact is False),
        failed=tuple(row.peer for row in others if row.trial is None),
        note=auto.note,
    )


def _over(auto: Row, row: Row) -> float:
    """Seconds of auto's step over those of this peer's."""
    if row.duel is not None:
        return row.duel.time_ratio
    assert row.time_ratio is not None and auto.time_ratio is not None
    return auto.time_ratio / row.time_ratio


def _is_open(row: Row, auto: Row) -> bool:
    if row.duel is not None:
        return row.duel.time_ratio_low < 1
    assert row.trial is not None and auto.trial is not None
    return row.trial.time_ratio_high >= auto.trial.time_ratio_low
