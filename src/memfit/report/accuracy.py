"""What rounding feature maps costs in accuracy: small networks trained on digits in each format, delayed and immediate.

Delayed reduction is memfit's own: forward computes in full precision and backward reads rounded maps. Immediate
reduction rounds the same maps to the same format as soon as they are made. Where delayed packs non-zeros, fp8 has its
scales for 256 elements of which only the non-zeros count; immediate counts them all. The other formats are the same.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit.errors import BadOption
from memfit.plan.policies.gist import FORMATS
from memfit.report.accuracy_data import digits
from memfit.report.accuracy_networks import FULL, NETWORKS
from memfit.report.accuracy_rows import NOISE_RULE, Duel, Row, duels_of, false_alarms, rows_of
from memfit.report.accuracy_training import (
    DELAYED,
    IMMEDIATE,
    MODES,
    NUDGED,
    REFERENCE,
    Recipe,
    Trained,
    Training,
    train,
)

DEFAULT_SEEDS = 10
DEFAULT_WORKERS = 2


@dataclass(frozen=True)
class Study:
    """Everything the study found."""

    recipe: Recipe
    num_test: int
    rows: tuple[Row, ...]
    duels: tuple[Duel, ...]
    duration_s: float

    @property
    def learning_rates(self) -> dict[str, float]:
        """Of each network that was trained."""
        return {row.network: self.recipe.rate_of(row.network) for row in self.rows}

    @property
    def fp16_within_noise(self) -> bool | None:
        """Delayed fp16 on every network; None if it was not trained, or cannot be told."""
        return _all([row.difference.within_noise for row in self.rows if _is_delayed_fp16(row) and row.difference])

    @property
    def delayed_not_worse(self) -> bool | None:
        """Delayed against immediate at every width on every network; None without duels, or if it cannot be told."""
        return _all([duel.difference.not_worse for duel in self.duels])

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe) | {"num_test": self.num_test, "learning_rate": self.learning_rates},
            "modes": dict(MODES),
            "noise_rule": NOISE_RULE,
            "false_alarms": false_alarms(len(self.rows[0].seeds)),
            "accuracy_rows": [row.to_dict() for row in self.rows],
            "delayed_minus_immediate": [duel.to_dict() for duel in self.duels],
            "fp16_within_noise": self.fp16_within_noise,
            "delayed_not_worse": self.delayed_not_worse,
            "torch": torch.__version__,
            "duration_s": self.duration_s,
        }


def _all(found: list[bool | None]) -> bool | None:
    """Whether all are true; None if there are none, or if it hangs on one that is not known."""
    if False in found:
        return False
    return None if not found or None in found else True


def _is_delayed_fp16(row: Row) -> bool:
    return row.format == "fp16" and row.mode == DELAYED


def study_accuracy(
    *,
    networks: Sequence[str] = tuple(NETWORKS),
    formats: Sequence[str] = FORMATS,
    modes: Sequence[str] = (DELAYED, IMMEDIATE),
    seeds: Sequence[int] = tuple(range(DEFAULT_SEEDS)),
    recipe: Recipe | None = None,
    num_workers: int = DEFAULT_WORKERS,
    progress: Callable[[str], None] = lambda text: None,
) -> Study:
    """Train every combination and compare it with fp32, seed by seed.

    With `num_workers` above 1, trainings are spread over that many processes, each on one thread; with 1, they are
    done here. The figures are the same.
    """
    recipe = recipe or Recipe()
    plan = trainings(networks, formats, modes, seeds)
    data = digits(num_train=recipe.num_train, num_test=recipe.num_test)  # before minutes are spent
    start_s = time.perf_counter()
    found: dict[Training, Trained] = {}
    for trained in _trained(plan, recipe, num_workers):
        found[trained.training] = trained
        progress(f"training, {len(found)} of {len(plan)} done: {trained.training.title}")
    in_order = [found[training] for training in plan]
    num_test = len(data.test_labels)
    return Study(
        recipe,
        num_test,
        tuple(rows_of(in_order, num_test=num_test)),
        tuple(duels_of(in_order, num_test=num_test)),
        time.perf_counter() - start_s,
    )


def trainings(
    networks: Sequence[str], formats: Sequence[str], modes: Sequence[str], seeds: Sequence[int]
) -> list[Training]:
    """All that is to be trained: for each network fp32, fp32 nudged, and each format in each mode."""
    for kind, asked, known in (
        ("network", networks, tuple(NETWORKS)),
        ("format", formats, (FULL, *FORMATS)),
        ("mode", modes, (DELAYED, IMMEDIATE)),
    ):
        for name in asked:
            if name not in known:
                raise BadOption(f"{kind} {name!r}: the accuracy study has {', '.join(known)}")
        if len(set(asked)) < len(asked):
            raise BadOption(f"{kind}s {', '.join(asked)}: each may be named once")
    if not networks or not seeds or len(set(seeds)) < len(seeds):
        raise BadOption("the accuracy study needs a network and a seed at least, and each seed once")
    arms = [(FULL, REFERENCE), (FULL, NUDGED)]
    arms += [(format, mode) for format in formats if format != FULL for mode in modes]
    return [Training(network, *arm, seed) for network in networks for arm in arms for seed in seeds]


def _trained(plan: list[Training], recipe: Recipe, num_workers: int) -> Iterator[Trained]:
    """The results as they come."""
    if num_workers == 1:
        for training in plan:
            yield train(training, recipe)
        return
    # Spawned: torch's threads do not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        futures = [pool.submit(train, training, recipe) for training in plan]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            # After an error or an interrupt nobody waits for what has not begun.
            pool.shutdown(wait=False, cancel_futures=True)
