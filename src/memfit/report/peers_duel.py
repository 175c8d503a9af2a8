"""auto and one peer in turn: which of the two is faster, where their times over eager leave that open.

Each takes two steps before it is the other's turn, and only the second counts. In training a step comes behind one of
its own kind. Behind one of another kind it may take longer, since it finds other memory: on vgg16_bn auto's steps took
longer behind inductor's, for as many fresh pages, and inductor's no longer behind auto's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit import zoo
from memfit.report.measure import Times, in_turn, quartiles
from memfit.report.peers_setting import Setting
from memfit.report.peers_trial import AUTO_TIMES, LEARNING_RATE, arm_by, is_warm, rounds, start_from
from memfit.report.step_module import TrainingStep

_ENOUGH_S = 120.0
_IN_A_ROW = 2


@dataclass(frozen=True)
class Duel:
    """How long auto took beside a peer.

    Attributes:
        time_ratio: seconds of auto's step over those of the peer's beside it, the median; low and high are the
            quartiles.
    """

    time_ratio: float
    time_ratio_low: float
    time_ratio_high: float
    step_s: float
    peer_step_s: float
    num_timed: int

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Duel:
        return cls(**plain)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def duel(auto: Setting, peer: Setting, network: str, *, steps: int, seed: int, **loaded: Any) -> Duel:
    """Train `network` both ways in this process: four times `steps`, fewer of long ones.

    Two ratios to eager, measured at two times, differ by what the machine did in between. Of this one each pair is of
    the same moment. Bits are not compared: the trials have done that.
    """
    model, call = TrainingStep.of(zoo.load(network, seed=seed, **loaded))
    ours, theirs = (arm_by(setting, model, call, seed=seed) for setting in (auto, peer))
    pairs: list[tuple[float, float]] = []

    def step() -> None:
        ours.forget()
        theirs.forget()
        for arm in (ours, theirs) if len(pairs) % 2 else (theirs, ours):
            for _ in range(_IN_A_ROW):
                arm.forget()
                arm.step()
                arm.put_gradients_aside()
        pairs.append((ours.step_s, theirs.step_s))
        ours.update(LEARNING_RATE)
        start_from(theirs, ours)  # a peer may be inexact, and its weights would part from auto's

    while not (is_warm(ours.fitted, len(pairs)) and is_warm(theirs.fitted, len(pairs))):
        step()
    num_warm_up = len(pairs)
    for _ in rounds(AUTO_TIMES * steps, _ENOUGH_S):
        step()
    timed = in_turn(pairs[num_warm_up:])
    times = Times.of(timed)
    low, high = quartiles(timed)
    return Duel(times.time_ratio, low, high, times.step_s, times.eager_step_s, len(timed))
