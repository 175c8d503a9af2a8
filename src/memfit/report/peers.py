"""Peers side by side at equal measured peak: each at the fastest of its settings that stays within the same target.

The target is a share of eager's measured activation peak. Every peak is that of a process of its own; every time is
beside eager's in one process. A peer that no setting brings within the target is shown at its smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from memfit import zoo
from memfit.report.peers_duel import Duel
from memfit.report.peers_process import ArmFailed, Asked, Case, Workers
from memfit.report.peers_setting import AUTO, EAGER, MEMORY_BUDGETS, PEERS, Kind, Peer, Setting, fixed_settings
from memfit.report.peers_trial import Trial
from memfit.report.step_module import TrainingStep

FIRST, ALL = "first", "all"
SWEEPS = (FIRST, ALL)
"""Of settings that are ordered by what they recompute: look for the first within the target, or try every one."""

_NUM_CONTENDERS, _NEARLY_AS_FAST = 2, 1.05
"""Settings of one peer that are timed, where several are within the target: the fastest under a pinned malloc, and
another one if that was nearly as fast."""
_MAX_BUDGETS = 3
"""Plans of one policy that are measured, each for less than the one before, until one is within the target."""
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class PeerPeak:
    """What a setting was measured to need, or why it could not be."""

    setting: Setting
    peak_bytes: int = 0
    activation_peak_bytes: int = 0
    pinned_step_s: float = 0.0
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "title": str(self.setting)}


@dataclass(frozen=True)
class Row:
    """One peer at one target.

    Attributes:
        target_bytes: what activations may take at most: the share of eager's.
        within: the measured activation peak is within the target.
        within_budget: the whole step is within the budget that it was planned for; None of those that have none.
        note: what else there is to say; of a peer that failed, why.
        tried: every setting that was measured for this target.
        duel: auto's time beside this peer's, where their times over eager leave open which of the two is faster.
    """

    network: str
    batch: int | None
    image: int | None
    share: float
    target_bytes: int
    eager_activation_peak_bytes: int
    peer: str
    is_ours: bool
    setting: Setting | None = None
    peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    within: bool = False
    within_budget: bool | None = None
    trial: Trial | None = None
    note: str = ""
    tried: tuple[PeerPeak, ...] = ()
    duel: Duel | None = None

    @property
    def exact(self) -> bool | None:
        """None if it was not tried."""
        return None if self.trial is None else self.trial.exact

    @property
    def time_ratio(self) -> float | None:
        return None if self.trial is None else self.trial.time_ratio

    @property
    def activation_share(self) -> float | None:
        """Of eager's measured activation peak."""
        if self.activation_peak_bytes is None:
            return None
        return self.activation_peak_bytes / max(self.eager_activation_peak_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {
            **found,
            "setting": None if self.setting is None else str(self.setting),
            "settings": None if self.setting is None else self.setting.to_dict(),
            "exact": self.exact,
            "time_ratio": self.time_ratio,
            "activation_share": self.activation_share,
            "tried": [peak.to_dict() for peak in self.tried],
        }


@dataclass(frozen=True)
class Comparison:
    """All rows of one network, and the smallest budget that auto can plan for."""

    case: Case
    rows: tuple[Row, ...]
    smallest: dict[str, Any] | None = None
    smallest_failure: str = ""


@dataclass
class Contest:
    """One network: measures what is asked for, each setting once."""

    case: Case
    workers: Asked = field(default_factory=Workers)
    memory_budgets: tuple[float, ...] = MEMORY_BUDGETS
    sweep: str = FIRST
    progress: Callable[[str], None] = lambda text: None
    _peaks: dict[Setting, PeerPeak] = field(default_factory=dict)
    _trials: dict[Setting, Trial] = field(default_factory=dict)

    def compare(self, peers: Sequence[Peer], shares: Sequence[float]) -> Comparison:
        """Rows of every peer at every share; eager's is first."""
        eager = self._peak(Setting(EAGER))
        if eager.failure:
            return Comparison(self.case, (self._failed(PEERS[EAGER], 1.0, eager, eager.failure),))
        rows = [self._eager_row(eager)]
        others = [peer for peer in peers if peer.kind is not Kind.EAGER]
        for share in shares:
            rows += self._with_duels([self._row(peer, share, eager) for peer in others], eager)
        if not any(peer.name == AUTO for peer in peers):
            return Comparison(self.case, tuple(rows))
        try:
            self.progress(f"{self.case.network}: the smallest budget")
            return Comparison(self.case, tuple(rows), self.workers.ask("smallest", self.case, policy=AUTO))
        except ArmFailed as failure:
            return Comparison(self.case, tuple(rows), smallest_failure=str(failure))

    def _row(self, peer: Peer, share: float, eager: PeerPeak) -> Row:
        target_bytes = int(share * eager.activation_peak_bytes)
        try:
            if peer.takes_budget:
                return self._budgeted_row(peer, share, eager, target_bytes)
            tried = tuple(self._tried(peer, target_bytes))
            return self._best_row(peer, share, eager, tried)
        except ArmFailed as failure:
            return self._failed(peer, share, eager, str(failure))

    def _with_duels(self, rows: Sequence[Row], eager: PeerPeak) -> list[Row]:
        """The rows of one share; those that may be as fast as auto's are timed beside it."""
        auto = next((row for row in rows if row.peer == AUTO), None)
        return [row if auto is None else self._with_duel(row, auto, eager) for row in rows]

    def _with_duel(self, row: Row, auto: Row, eager: PeerPeak, *, is_again: bool = False) -> Row:
        """That row, with its duel if it may be as fast as auto's.

        What was measured since a policy was planned may have shown that it needs more: its row is then made anew, once.
        """
        if not _may_be_as_fast(row, auto):
            return row
        assert row.setting is not None and auto.setting is not None
        self.progress(f"{self.case.network}: timing auto beside {row.peer} {row.setting}")
        try:
            settings = {"setting": auto.setting.to_dict(), "beside": row.setting.to_dict()}
            return replace(row, duel=Duel.from_dict(self.workers.ask("duel", self.case, **settings)))
        except ArmFailed as failure:
            peer = PEERS[row.peer]
            if peer.takes_budget and not is_again:
                anew = self._row(peer, row.share, eager)
                if anew.setting not in (None, row.setting):
                    return self._with_duel(anew, auto, eager, is_again=True)
            return replace(row, note="; ".join(filter(None, (row.note, f"beside auto: {failure}"))))

    def _eager_row(self, eager: PeerPeak) -> Row:
        """Eager beside itself: its ratio is 1 but for the noise of this machine."""
        return self._best_row(PEERS[EAGER], 1.0, eager, (eager,))

    def _best_row(self, peer: Peer, share: float, eager: PeerPeak, tried: tuple[PeerPeak, ...]) -> Row:
        """The fastest setting within the target; if there is none, the smallest."""
        target_bytes = int(share * eager.activation_peak_bytes)
        measured = [peak for peak in tried if not peak.failure]
        if not measured:
            return self._failed(peer, share, eager, "; ".join(dict.fromkeys(p.failure for p in tried)), tried)
        within = [peak for peak in measured if peak.activation_peak_bytes <= target_bytes]
        fastest_s = min((peak.pinned_step_s for peak in within), default=0.0)
        near = [peak for peak in within if peak.pinned_step_s <= _NEARLY_AS_FAST * fastest_s]
        contenders = sorted(near, key=lambda peak: peak.pinned_step_s)[:_NUM_CONTENDERS]
        note = ""
        if not contenders:
            contenders = [min(measured, key=lambda peak: peak.activation_peak_bytes)]
            note = "no setting is within the target: this is its smallest"
        trials: dict[Setting, Trial] = {}
        failures: list[str] = []
        for peak in contenders:
            try:
                trials[peak.setting] = self._trial(peak.setting)
            except ArmFailed as failure:
                failures.append(f"{peak.setting}: {failure}")
        if not trials:
            return self._failed(peer, share, eager, "; ".join(failures), tried)
        best = min(trials, key=lambda setting: trials[setting].time_ratio)
        return self._made(peer, share, eager, self._peaks[best], trial=trials[best], note=note, tried=tried)

    def _budgeted_row(self, peer: Peer, share: float, eager: PeerPeak, target_bytes: int) -> Row:
        """A policy at the budget whose measured activations are within the target, or at its smallest."""
        tried: list[PeerPeak] = []
        asked_bytes, failure = target_bytes, ""
        for num_left in reversed(range(_MAX_BUDGETS)):
            self.progress(f"{self.case.network}: planning by {peer.name}")
            found = self.workers.ask("budget", self.case, policy=peer.name, target_bytes=asked_bytes)
            setting = Setting(peer.name, budget_bytes=found["budget_bytes"])
            is_new = all(setting != peak.setting for peak in tried)
            if failure and not is_new:
                return self._failed(peer, share, eager, failure, tuple(tried))
            peak = self._peak(setting)
            tried += [peak] * is_new
            failure = peak.failure
            if failure:
                continue
            excess_bytes = peak.activation_peak_bytes - target_bytes
            if excess_bytes > 0 and not found["misfit"] and num_left and is_new:
                asked_bytes -= excess_bytes + _MARGIN_BYTES
                continue
            try:
                trial = self._trial(setting)
                break
            except ArmFailed as error:
                # The first steps may have found larger workspaces: planned again, it knows them.
                failure = str(error)
        else:
            return self._failed(peer, share, eager, failure, tuple(tried))
        note = found["misfit"]
        if peak.activation_peak_bytes > target_bytes and not note:
            note = "measured above the target, although planned within it"
        growth_bytes = found["budget_bytes"] - found["base_bytes"]
        return self._made(
            peer,
            share,
            eager,
            peak,
            trial=trial,
            note=note,
            tried=tuple(tried),
            within_budget=peak.peak_bytes <= growth_bytes,
        )

    def _tried(self, peer: Peer, target_bytes: int) -> Iterator[PeerPeak]:
        """The peaks of the peer's settings, those that are asked for."""
        step = self._step if peer.kind is Kind.CHECKPOINT else None
        try:
            settings = fixed_settings(peer, step, self.memory_budgets)
        except Exception as error:  # a network without a chain of blocks
            raise ArmFailed(str(error)) from error
        if self.sweep == ALL or peer.kind not in (Kind.CHECKPOINT, Kind.COMPILE):
            yield from (self._peak(setting) for setting in settings)
            return
        if peer.kind is Kind.CHECKPOINT:
            # Who recomputes more may need more all the same, if it is in longer stretches: so one after the other.
            for setting in settings:
                peak = self._peak(setting)
                yield peak
                if not peak.failure and peak.activation_peak_bytes <= target_bytes:
                    return
            return
        # Compiling takes minutes, and a smaller memory budget saves more: the largest one within the target.
        low, high = 0, len(settings) - 1
        while low <= high:
            middle = (low + high) // 2
            peak = self._peak(settings[middle])
            yield peak
            if not peak.failure and peak.activation_peak_bytes <= target_bytes:
                high = middle - 1
            else:
                low = middle + 1

    def _peak(self, setting: Setting) -> PeerPeak:
        if setting not in self._peaks:
            self.progress(f"{self.case.network}: the peak of {setting.peer} {setting}")
            try:
                found = self.workers.ask("peak", self.case, setting=setting.to_dict())
                self._peaks[setting] = PeerPeak(setting, **found)
            except ArmFailed as failure:
                self._peaks[setting] = PeerPeak(setting, failure=str(failure))
        return self._peaks[setting]

    def _trial(self, setting: Setting) -> Trial:
        if setting not in self._trials:
            self.progress(f"{self.case.network}: timing {setting.peer} {setting}")
            found = self.workers.ask("trial", self.case, setting=setting.to_dict())
            self._trials[setting] = Trial.from_dict(found)
        return self._trials[setting]

    @cached_property
    def _step(self) -> TrainingStep:
        """The network without its bytes, to see how it divides."""
        return TrainingStep.of(
            zoo.load(self.case.network, batch=self.case.batch, image=self.case.image, device="meta")
        )[0]

    def _made(self, peer: Peer, share: float, eager: PeerPeak, peak: PeerPeak, **more: Any) -> Row:
        target_bytes = int(share * eager.activation_peak_bytes)
        known = None if ":" in self.case.network else zoo.spec(self.case.network)
        return Row(
            network=self.case.network,
            batch=self.case.batch or (known.batch if known else None),
            image=self.case.image or (known.image if known else None),
            share=share,
            target_bytes=target_bytes,
            eager_activation_peak_bytes=eager.activation_peak_bytes,
            peer=peer.name,
            is_ours=peer.is_ours,
            setting=None if peak.failure else peak.setting,
            peak_bytes=None if peak.failure else peak.peak_bytes,
            activation_peak_bytes=None if peak.failure else peak.activation_peak_bytes,
            within=not peak.failure and peak.activation_peak_bytes <= target_bytes,
            **more,
        )

    def _failed(self, peer: Peer, share: float, eager: PeerPeak, reason: str, tried: tuple[PeerPeak, ...] = ()) -> Row:
        nothing = PeerPeak(Setting(peer.name), failure=reason)
        return self._made(peer, share, eager, nothing, note=reason, tried=tried)


def _may_be_as_fast(row: Row, auto: Row) -> bool:
    """True of a peer within the target of auto's row, unless its quartiles are all above auto's."""
    if row.peer in (AUTO, EAGER) or row.trial is None or auto.trial is None:
        return False
    return row.within and auto.within and row.trial.time_ratio_low <= auto.trial.time_ratio_high
