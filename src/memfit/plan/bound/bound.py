"""The least time that any plan within a budget takes, with its proof; and the least budget that any plan is within.

    bounds = Bounds(step, costs, codes={storage: Encode("mask")})
    bound = bounds.at(budget_bytes)
    bound.overhead, bound.certificate, bound.describe()
    bounds.refined(bound, target_ps=plan_ps - bound.keep_ps, num_solves=100)

What is the same for all budgets of a step is done once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.errors import BadOption
from memfit.plan.bound.account import Account
from memfit.plan.bound.branching import most_proven
from memfit.plan.bound.columns import Columns
from memfit.plan.bound.coupled import coupled_ps
from memfit.plan.bound.cut import Cut, Cuts, Share
from memfit.plan.bound.enumeration import Enumeration
from memfit.plan.bound.instants import crowded_instants, first_instants
from memfit.plan.decisions import Decisions

_NO_CODES: Decisions = MappingProxyType({})
_MOST_CUTS = 6
_MOST_COUPLED = 8
_MOST_COLUMNS = 6_000
"""Of several cuts in one program."""
_SMALL_COLUMNS = 600
"""Of one cut: such programs are solved in a moment."""
_MOST_BRANCHED, _MOST_TIGHT = 8, 12
_NUM_FLOOR_CUTS = 8
_FEW_STORAGES = 32
_NEAR = 0.001
"""Of the keep plan's time: what is proven elsewhere to that is worth a cut of its own."""


@dataclass(frozen=True)
class Certificate:
    """Why no plan is within the budget: an op, while it runs, and the bytes that are then there in every plan."""

    op: int
    target: str
    path: str
    needed_bytes: int
    instant: str

    def describe(self) -> str:
        return f"{self.instant}, every plan has at least {self.needed_bytes:,} bytes"


@dataclass(frozen=True)
class Floor:
    """The smallest budget that is not proven to be too small for every plan, and the op that sets it."""

    needed_bytes: int
    certificate: Certificate

    def describe(self) -> str:
        return f"no plan needs less than {self.needed_bytes:,} bytes: {self.certificate.describe()}"


@dataclass(frozen=True)
class Bound:
    """What no plan within the budget can be better than.

    Attributes:
        keep_ps: what the keep plan takes.
        over_ps: no plan within the budget takes less than this longer than the keep plan. Below zero where codes or
            ways are faster than what the keep plan does. None if no plan is within the budget.
        cut: the instant that proves it; None if it needs none.
        tried: the cuts at all instants that were tried.
        certificate: why no plan is within the budget, if so.
        smallest_bytes: no plan is within a smaller budget than that.
        instant: the cut in words.
        shares: what the optimum of the cut does with each storage: a place to start a search from.
    """

    budget_bytes: int
    keep_ps: int
    over_ps: int | None
    smallest_bytes: int
    certificate: Certificate | None = None
    cut: Cut | None = None
    tried: tuple[Cut, ...] = field(default=(), repr=False)
    instant: str = ""
    shares: Mapping[int, Share] = field(default_factory=dict, repr=False)

    @property
    def is_infeasible(self) -> bool:
        return self.certificate is not None

    @property
    def overhead(self) -> float | None:
        """The same as a share of the keep plan's time: 0.1 is ten per cent."""
        if self.over_ps is None:
            return None
        return self.over_ps / self.keep_ps if self.keep_ps else 0.0

    def describe(self) -> str:
        """One sentence for people."""
        if self.certificate is not None:
            return (
                f"no plan fits a budget of {self.budget_bytes:,} bytes: {self.certificate.describe()}. "
                f"Give at least {self.smallest_bytes:,} bytes, or a smaller batch"
            )
        assert self.overhead is not None
        least = f"no plan within {self.budget_bytes:,} bytes takes less than {self.overhead:+.2%} over keeping all"
        return f"{least}: {self.instant}" if self.instant else least


@dataclass(frozen=True)
class Bounds:
    """Bounds of one step for any budget."""

    step: Step
    costs: Costs
    codes: Decisions = field(default_factory=dict)

    @cached_property
    def account(self) -> Account:
        return Account(self.step, self.costs, self.codes)

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.account)

    def floor(self) -> Floor:
        """The smallest budget that is not proven to be too small."""
        return self._floor

    @cached_property
    def _floor(self) -> Floor:
        account = self.account
        if not account.num_ops:
            return Floor(0, Certificate(-1, "", "", 0, "the step has no ops"))
        needed = account.needed_bytes
        best = int(np.argmax(needed))
        found = (int(needed[best]), best)
        if not bool((self.columns.can_be_sent | self.columns.is_code).all()):
            # What can neither be sent nor dropped together with its sources stays: ask the rows.
            cuts = Cuts(account, self.columns, max(found[0], 1))
            for op in _sampled(crowded_instants(account, found[0]), _NUM_FLOOR_CUTS):
                found = max(found, (cuts.least_bytes(op), op))
        return Floor(found[0], self.certificate(found[1], found[0]))

    def at(self, budget_bytes: int, *, target_ps: int | None = None) -> Bound:
        """The bound at that budget; once it reaches `target_ps`, no better one is looked for."""
        if budget_bytes < 0:
            raise BadOption(f"budget_bytes={budget_bytes}: a bound is for a budget of bytes, not less than none")
        account = self.account
        floor = self._floor
        if floor.needed_bytes > budget_bytes:
            return Bound(budget_bytes, account.keep_ps, None, floor.needed_bytes, floor.certificate)
        cuts = Cuts(account, self.columns, budget_bytes)
        given_ps, added_ps = self._given_ps(cuts), account.codings.added_ps
        found = Bound(
            budget_bytes,
            account.keep_ps,
            given_ps + sum(min(added_ps[storage], 0) for storage in self.columns.coded),
            floor.needed_bytes,
        )
        search = _Search(self, cuts, given_ps, target_ps, found)
        return search.run()

    def refined(self, bound: Bound, *, target_ps: int, num_solves: int) -> Bound:
        """A bound of this step with whole tensors at the instants that say most: as high as the given one, or higher.

        Ends where it reaches `target_ps`, or after so many programs.
        """
        if bound.over_ps is None or bound.over_ps >= target_ps:
            return bound
        cuts = Cuts(self.account, self.columns, bound.budget_bytes)
        given_ps = self._given_ps(cuts)
        ops = self._promising(cuts, bound)
        found = most_proven(cuts, ops, target_ps=target_ps - given_ps, num_solves=num_solves)
        if found is None or given_ps + found.over_ps <= bound.over_ps:
            return bound
        return replace(
            bound,
            over_ps=given_ps + found.over_ps,
            cut=found.cut,
            instant=f"{self.instant(found.op)}, with whole tensors",
            shares=cuts.shares(found.cut),
        )

    def enumerated(self, bound: Bound, *, target_ps: int, num_sets: int) -> Bound:
        """A bound of this step by the fates of its largest storages: as high as the given one, or higher.

        Ends where it reaches `target_ps`, or after so many sets of plans; where storages are many, after fewer.
        """
        if bound.over_ps is None or bound.over_ps >= target_ps:
            return bound
        cuts = Cuts(self.account, self.columns, bound.budget_bytes)
        given_ps, search = self._given_ps(cuts), Enumeration(cuts)
        # Of many storages each says less, and going through what follows from them takes longer.
        num_nodes = num_sets if len(search.storages) <= _FEW_STORAGES else num_sets // 8
        over_ps = given_ps + search.run(target_ps=target_ps - given_ps, num_nodes=num_nodes)
        if over_ps <= bound.over_ps:
            return bound
        return replace(bound, over_ps=over_ps, instant=f"whatever becomes of {len(search.storages)} large storages")

    def _promising(self, cuts: Cuts, bound: Bound) -> list[int]:
        """Instants at which the most is proven with shares of tensors, and those with the least room."""
        needed = self.account.needed_bytes
        crowded = [
            op for op in crowded_instants(self.account, bound.budget_bytes) if int(needed[op]) <= bound.budget_bytes
        ]
        known = {cut.op: cut.over_ps for cut in bound.tried if cut.over_ps is not None}
        proofs = [cut.carried for cut in bound.tried if cut.carried is not None]
        for op in crowded if proofs else ():
            if op not in known:
                known[op] = max(cuts.estimate(op, proof) for proof in proofs)
        tightest = sorted(crowded, key=lambda op: (-int(needed[op]), op))[:_MOST_TIGHT]
        return list(dict.fromkeys([*sorted(known, key=lambda op: (-known[op], op))[:_MOST_BRANCHED], *tightest]))

    def _given_ps(self, cuts: Cuts) -> int:
        """What every plan adds, whatever it does with the storages that are worth a decision."""
        codings = self.account.codings
        others = set(codings.added_ps) - set(self.columns.coded)
        least_ps = sum(min(codings.added_ps[storage], 0) for storage in others)
        return sum(cuts.op_ps) - self.account.keep_ps + codings.sure_ps + least_ps

    def certificate(self, op: int, needed_bytes: int) -> Certificate:
        """That any plan has so many bytes while the op runs."""
        known = self.step.ops[op]
        return Certificate(op, known.target, known.path, needed_bytes, self.instant(op))

    def instant(self, op: int) -> str:
        """When that is, in words."""
        known = self.step.ops[op]
        return f"while {known.target} (op {op}, {known.half.value}) of module '{known.path or '(root)'}' runs"


class _Search:
    """Cuts at one instant after the other: where the proofs of the others already prove the most."""

    def __init__(self, bounds: Bounds, cuts: Cuts, given_ps: int, target_ps: int | None, first: Bound) -> None:
        self.bounds, self.cuts, self.given_ps, self.target_ps, self.best = bounds, cuts, given_ps, target_ps, first
        self.estimates: dict[int, int] = {}
        self.tried: dict[int, Cut] = {}

    def run(self) -> Bound:
        """The best bound, with what its optimum does."""
        account = self.bounds.account
        crowded = crowded_instants(account, self.best.budget_bytes)
        starts = first_instants(account, crowded) if crowded else []
        for _ in range(_MOST_CUTS):
            op = starts.pop(0) if starts else self._most_promising()
            if op is None:
                op = self._tightest(crowded)
            if op is None or self._is_over():
                break
            self._try(op, crowded)
        self._couple(crowded)
        shares = {} if self.best.cut is None else self.cuts.shares(self.best.cut)
        return replace(self.best, tried=tuple(self.tried.values()), shares=shares)

    def _couple(self, crowded: list[int]) -> None:
        """Where compute waits, cut at several instants at once."""
        best, columns = self.best, self.bounds.columns
        if self._is_over() or best.cut is None or best.cut.waits_ps <= best.keep_ps * _NEAR:
            return
        count = max(min(_MOST_COUPLED, _MOST_COLUMNS // columns.width), 1)
        ops = {best.cut.op, *_sampled(crowded, count)}
        if len(ops) < 2 or any(self.bounds.account.needed_bytes[op] > best.budget_bytes for op in ops):
            return
        over_ps = self.given_ps + coupled_ps(self.cuts, sorted(ops))
        assert best.over_ps is not None
        if over_ps > best.over_ps:
            instant = f"{best.instant}, and at {len(ops) - 1} other instants"
            self.best = replace(best, over_ps=over_ps, instant=instant)

    def _most_promising(self) -> int | None:
        """The untried instant at which the most is proven, if that is not much less than what is proven anyway."""
        left = {op: over_ps for op, over_ps in self.estimates.items() if op not in self.tried}
        if not left or self.best.over_ps is None:
            return None
        op = max(left, key=lambda key: left[key])
        # As long as nothing is proven, what is no better than that is not worth a look.
        near_ps = 0 if self.best.cut is None else int(self.best.keep_ps * _NEAR)
        return op if self.given_ps + left[op] > self.best.over_ps - near_ps else None

    def _tightest(self, crowded: list[int]) -> int | None:
        """The untried instant with the least room, where programs are small: proofs of others say little about it."""
        left = [op for op in crowded if op not in self.tried]
        if not left or self.best.cut is None or self.bounds.columns.width > _SMALL_COLUMNS:
            return None
        return max(left, key=lambda op: int(self.bounds.account.needed_bytes[op]))

    def _is_over(self) -> bool:
        if self.best.over_ps is None:
            return True
        return self.target_ps is not None and self.best.over_ps >= self.target_ps

    def _try(self, op: int, crowded: list[int]) -> None:
        cut = self.tried[op] = self.cuts.at(op)
        instant = self.bounds.instant(op)
        if cut.over_ps is None:
            certificate = self.bounds.certificate(op, cut.needed_bytes)
            smallest_bytes = max(self.best.smallest_bytes, cut.needed_bytes)
            self.best = replace(
                self.best,
                over_ps=None,
                smallest_bytes=smallest_bytes,
                certificate=certificate,
                cut=cut,
                instant=instant,
            )
            return
        assert self.best.over_ps is not None
        if self.given_ps + cut.over_ps > self.best.over_ps:
            self.best = replace(self.best, over_ps=self.given_ps + cut.over_ps, cut=cut, instant=instant)
        if cut.carried is not None:
            for other in crowded:
                found = self.cuts.estimate(other, cut.carried)
                self.estimates[other] = max(found, self.estimates.get(other, found))


def floor(step: Step, costs: Costs, *, codes: Decisions = _NO_CODES) -> Floor:
    """The smallest budget that is not proven to be too small for every plan, and the op that sets it."""
    return Bounds(step, costs, codes).floor()


def _sampled(ops: list[int], count: int) -> list[int]:
    """So many of the ops, evenly."""
    return [ops[i] for i in sorted({int(i) for i in np.linspace(0, len(ops) - 1, count)})] if ops else []
