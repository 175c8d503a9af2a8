"""What is compared: ways to train in less memory, ours and others', each with the settings it can be tried at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

from memfit.api import fit
from memfit.errors import BadOption, MemfitError
from memfit.plan.budget import Budget
from memfit.plan.options import Options
from memfit.plan.policies.registry import POLICIES
from memfit.report.peers_chain import checkpoint_blocks, checkpoint_segments, stages_of
from memfit.report.step_module import TrainingStep
from memfit.torch_internals import set_activation_memory_budget

EAGER = "eager"
AUTO = "auto"

MEMORY_BUDGETS = (0.2, 0.35, 0.5, 0.7, 1.0)
"""Of torch.compile: what share of the activations the partitioner may save, by its own account. Even at 1 it recomputes
what it takes to be cheap, and that can be most of them."""

_NUM_SEGMENTS = (2, 3, 4, 6, 8)
_BLOCK_SHARES = (1 / 4, 1 / 2, 1.0)


class Kind(Enum):
    """How a peer saves memory."""

    EAGER = "eager"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    POLICY = "policy"


@dataclass(frozen=True)
class Peer:
    """One way to train.

    Attributes:
        backend: of torch.compile.
        takes_budget: of a policy: it looks for the fastest plan within a budget; others have one plan, whatever it is.
    """

    name: str
    kind: Kind
    backend: str | None = None
    takes_budget: bool = False

    @property
    def is_ours(self) -> bool:
        return self.kind is Kind.POLICY

    @property
    def gives_gradients_at_once(self) -> bool:
        """True if all gradients are handed over when backward is done, and not as they are made."""
        return self.kind is Kind.COMPILE


PEERS = {
    peer.name: peer
    for peer in (
        Peer(EAGER, Kind.EAGER),
        Peer("checkpoint", Kind.CHECKPOINT),
        Peer("compile-aot-eager", Kind.COMPILE, backend="aot_eager"),
        Peer("compile-inductor", Kind.COMPILE, backend="inductor"),
        Peer("checkpoint-search", Kind.POLICY),
        Peer("rotor", Kind.POLICY, takes_budget=True),
        Peer("overlap", Kind.POLICY, takes_budget=True),
        Peer("gist-lossless", Kind.POLICY),
        Peer(AUTO, Kind.POLICY, takes_budget=True),
    )
}


def peer_named(name: str) -> Peer:
    """The peer of that name."""
    if name not in PEERS:
        raise BadOption(f"--peers {name}: unknown. Known peers: {', '.join(PEERS)}")
    return PEERS[name]


@dataclass(frozen=True)
class Setting:
    """A peer with all that it can be told; what does not concern it is None.

    Attributes:
        num_segments: torch.utils.checkpoint around that many stretches of the chain of blocks, but the last.
        num_blocks: torch.utils.checkpoint around each of the first that many blocks.
        memory_budget: torch.compile's activation_memory_budget.
        budget_bytes: of a policy: all that may be there at once, parameters and gradients included.
    """

    peer: str
    num_segments: int | None = None
    num_blocks: int | None = None
    memory_budget: float | None = None
    budget_bytes: int | None = None

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Setting:
        return cls(**{field.name: plain[field.name] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.num_segments is not None:
            return f"{self.num_segments} segments"
        if self.num_blocks is not None:
            return f"each of the first {self.num_blocks} blocks"
        if self.memory_budget is not None:
            return f"memory budget {self.memory_budget:g}"
        if self.budget_bytes is not None:
            return f"budget {self.budget_bytes:,} bytes"
        return ""

    @property
    def options(self) -> Options | None:
        """With what the model is to be fitted; None for what memfit has no part in."""
        if not PEERS[self.peer].is_ours:
            return None
        require_policy(self.peer)
        return Options(budget=Budget.of(self.budget_bytes), policy=self.peer)

    def apply(self, step: TrainingStep) -> None:
        """Let the training step run this way, in place. Of ours only where times are not taken: nothing is measured."""
        peer = PEERS[self.peer]
        if self.num_segments is not None:
            checkpoint_segments(step.model, self.num_segments)
        elif self.num_blocks is not None:
            checkpoint_blocks(step.model, self.num_blocks)
        elif peer.kind is Kind.COMPILE:
            assert self.memory_budget is not None and peer.backend is not None
            # Read when the step is compiled, at its first call: so a process has one setting at a time.
            set_activation_memory_budget(self.memory_budget)
            step.compile(backend=peer.backend)
        elif peer.is_ours:
            require_policy(self.peer)
            # Prices are those that planning measured before: times under a pinned malloc are worth nothing.
            fit(step, policy=self.peer, budget=self.budget_bytes, measure_s=0.0)

    @property
    def unbudgeted(self) -> Setting | None:
        """torch.compile without a budget: the same kernels, but nothing random is computed twice. None of others."""
        return None if self.memory_budget is None else replace(self, memory_budget=1.0)


def require_policy(name: str) -> None:
    """Raise if memfit has no policy of that name."""
    if name not in POLICIES:
        raise MemfitError(f"no policy '{name}' in this memfit. Known policies: {', '.join(POLICIES)}")


def fixed_settings(peer: Peer, step: TrainingStep | None, memory_budgets: tuple[float, ...]) -> list[Setting]:
    """The settings that are known before anything is planned, those that recompute most last.

    `step` is needed for peers that divide the network into blocks. Policies that take a budget have none: it is found
    by planning.
    """
    match peer.kind:
        case Kind.CHECKPOINT:
            assert step is not None
            num_stages = len(stages_of(step.model))
            segments = [Setting(peer.name, num_segments=n) for n in _NUM_SEGMENTS if n < num_stages]
            # The last stage is never worth it: it would be recomputed at once.
            counts = dict.fromkeys(max(1, round(share * (num_stages - 1))) for share in _BLOCK_SHARES)
            blocks = [Setting(peer.name, num_blocks=n) for n in counts]
            return sorted((*blocks, *segments), key=lambda setting: _num_recomputed(setting, num_stages))
        case Kind.COMPILE:
            return [Setting(peer.name, memory_budget=b) for b in sorted(set(memory_budgets), reverse=True)]
        case _ if peer.takes_budget:
            return []
        case _:
            return [Setting(peer.name)]


def _num_recomputed(setting: Setting, num_stages: int) -> int:
    """How many stages of the chain torch.utils.checkpoint runs twice."""
    if setting.num_segments is None:
        return setting.num_blocks or 0
    return (setting.num_segments - 1) * (num_stages // setting.num_segments)
