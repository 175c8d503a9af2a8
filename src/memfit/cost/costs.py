"""What things cost on a device: each op's time and workspace, each link's speed, each codec's throughput.

Times are whole picoseconds. Sums of whole numbers do not depend on the order they are added in, so the simulator, the
native evaluator and the checker agree exactly, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from memfit.capture.rerun_form import rerun_form
from memfit.capture.rewrites.chunks import is_in_chunks
from memfit.capture.step import Op, Step
from memfit.cost.signature import signature, signatures
from memfit.errors import BadOption, MemfitError

PS_PER_S = 10**12
HERE = "here"
"""The name of this machine among devices: its costs are measured, not looked up."""


def picoseconds(duration_s: float) -> int:
    """Seconds as whole picoseconds."""
    return round(duration_s * PS_PER_S)


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op run alone: how long it takes, and what it holds beyond its operands and results while it runs.

    `rerun_ps` is how long it takes in the form it is run again in; None: as long as the first time.
    """

    time_ps: int
    workspace_bytes: int = 0
    is_estimated: bool = False
    rerun_ps: int | None = None

    @property
    def again_ps(self) -> int:
        return self.time_ps if self.rerun_ps is None else self.rerun_ps


@dataclass(frozen=True, slots=True)
class Link:
    """A way to a tier: one channel out, one channel back (which may be the same one).

    Attributes:
        send_drag, fetch_drag: the share of a transfer's time that compute loses to it, from 0 to 1. Engines that copy
            by themselves take nothing; a disk's requests take cores and memory bandwidth from kernels.
    """

    tier: str
    send_channel: str
    fetch_channel: str
    send_bytes_per_s: float
    fetch_bytes_per_s: float
    latency_s: float = 0.0
    send_drag: float = 0.0
    fetch_drag: float = 0.0

    def __post_init__(self) -> None:
        for name in ("send_drag", "fetch_drag"):
            if not 0 <= (drag := getattr(self, name)) <= 1:
                raise BadOption(f"link to '{self.tier}': {name}={drag}: give a share of the transfer's time, 0 to 1")

    def send_ps(self, num_bytes: int) -> int:
        return picoseconds(self.latency_s + num_bytes / self.send_bytes_per_s)

    def fetch_ps(self, num_bytes: int) -> int:
        return picoseconds(self.latency_s + num_bytes / self.fetch_bytes_per_s)

    @property
    def has_drag(self) -> bool:
        return self.send_drag > 0 or self.fetch_drag > 0

    def send_drag_ps(self, num_bytes: int) -> int:
        """What compute loses while so much is sent."""
        return int(self.send_drag * self.send_ps(num_bytes))

    def fetch_drag_ps(self, num_bytes: int) -> int:
        return int(self.fetch_drag * self.fetch_ps(num_bytes))


@dataclass(frozen=True, slots=True)
class CodecRate:
    """How fast a codec reads the tensor it encodes and writes the tensor it decodes; a call takes `call_s` first.

    With `of_traffic` the rates are of all bytes that are read and written, codes and gradients included.
    """

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    call_s: float = 0.0
    of_traffic: bool = False


@dataclass(frozen=True)
class Costs:
    """The price list of one device.

    Attributes:
        device: its name in the catalogue, or "here".
        by_signature: what each distinct op costs (see cost/signature.py).
        links: the tiers that can be reached, by name.
        codecs: throughput of each codec, by name.
        default_codec: that of codecs not in the list.
        memory_bytes: what the device has in all; None if that is not known.
        source: where the figures come from, for people.
        notes: assumptions a reader of a report should know, one line each.
        algorithms: ops that can be computed in several ways: for each signature what it costs by each, by name. On
            this machine they are "whole" and "chunks:N" (capture/rewrites/chunks.py), in the catalogue those of cuDNN.
        densities: by storage of one step, what share of its elements is not zero; of others that is not known.
        unforeseen: storages of one step whose tensors were seen to be laid out otherwise than capture says.
        picked: for ops of one step, by number, which of these a policy chose. Others cost what the list says. The
            step that a program runs may have other numbers: see `following`.
    """

    device: str
    by_signature: Mapping[str, OpCost]
    links: Mapping[str, Link] = field(default_factory=dict)
    codecs: Mapping[str, CodecRate] = field(default_factory=dict)
    default_codec: CodecRate = field(default=CodecRate(5e9, 5e9))
    memory_bytes: int | None = None
    source: str = ""
    notes: tuple[str, ...] = ()
    algorithms: Mapping[str, Mapping[str, OpCost]] = field(default_factory=dict)
    picked: Mapping[int, str] = field(default_factory=dict)
    densities: Mapping[int, float] = field(default_factory=dict)
    unforeseen: frozenset[int] = frozenset()

    def extended_by(self, others: Costs) -> Costs:
        """These prices, and another list's of ops that have none here, or one that is only estimated."""
        known = {key: cost for key, cost in self.by_signature.items() if not cost.is_estimated}
        ways = {key: ways for key, ways in self.algorithms.items() if key in known}
        return replace(
            self,
            by_signature={**others.by_signature, **known},
            algorithms={**others.algorithms, **ways},
            notes=others.notes,
        )

    def of(self, step: Step) -> tuple[OpCost, ...]:
        """The cost of each op of the step, in order."""
        return tuple(self._of(step, index, op) for index, op in enumerate(step.ops))

    def covers(self, step: Step) -> bool:
        """True if every op of the step has a price here."""
        return all(signature(step, op) in self.by_signature for op in priced_calls(step))

    def choices(self, step: Step) -> dict[int, Mapping[str, OpCost]]:
        """The ops of the step that can be computed in several ways, by number: what each way costs, by name."""
        if not self.algorithms:
            return {}
        return {index: self.algorithms[key] for index, key in enumerate(signatures(step)) if key in self.algorithms}

    def picking(self, picked: Mapping[int, str]) -> Costs:
        """The same prices with these ops computed these ways."""
        return replace(self, picked=dict(picked))

    def following(self, step: Step, lowered: Step) -> Costs:
        """The same prices for the step that a program of `step` runs: what was picked, by the numbers of ops there.

        Ops that are in chunks there have a price of their own, and codes move the numbers of all that follow.
        """
        if not self.picked:
            return self
        number = {op.made[0]: index for index, op in enumerate(lowered.ops) if op.made and not is_in_chunks(op)}
        made = {step.ops[index].made[0]: way for index, way in self.picked.items()}
        return self.picking({number[value]: way for value, way in made.items() if value in number})

    def _of(self, step: Step, index: int, op: Op) -> OpCost:
        if op.target.startswith("memfit."):
            return self._of_codec(step, op)
        try:
            key = signatures(step)[index]
            is_picked = index in self.picked and not is_in_chunks(op)  # else it is written into the step already
            cost = self.algorithms[key][self.picked[index]] if is_picked else self.by_signature[key]
            if not op.again:
                return cost
            again = self.by_signature[signature(step, rerun_form(op))]
            return replace(
                cost, workspace_bytes=max(cost.workspace_bytes, again.workspace_bytes), rerun_ps=again.time_ps
            )
        except KeyError:
            raise MemfitError(
                f"the costs of '{self.device}' do not cover op {index} of the step, {op.target} in module "
                f"'{op.path or '(root)'}'. Price the step itself, with its rewrites"
            ) from None

    def _of_codec(self, step: Step, op: Op) -> OpCost:
        """Encoding streams the tensor in; decoding, or what works on a code, streams it out."""
        if op.target == "memfit.view":
            return OpCost(0)
        codec = str(op.args[-1])
        rate = self.codecs.get(codec, self.default_codec)
        read, written = (sum(step.values[v].bytes for v in values) for values in (op.reads(), op.made))
        is_encoding = op.target == "memfit.encode"
        counted = read + written if rate.of_traffic else read if is_encoding else written
        return OpCost(
            picoseconds(rate.call_s + counted / (rate.encode_bytes_per_s if is_encoding else rate.decode_bytes_per_s))
        )

    def link(self, tier: str) -> Link:
        try:
            return self.links[tier]
        except KeyError:
            known = ", ".join(sorted(self.links)) or "none"
            raise MemfitError(f"device '{self.device}' has no tier '{tier}'. Tiers it has: {known}") from None

    @property
    def num_estimated(self) -> int:
        return sum(cost.is_estimated for cost in self.by_signature.values())


def priced_calls(step: Step) -> Iterator[Op]:
    """The calls that a price list must cover: the step's ops, and others that are run again in their place."""
    for op in step.ops:
        if not op.target.startswith("memfit."):  # codecs have rates
            yield op
            if op.again:
                yield rerun_form(op)


def free_of_charge(step: Step, *, tiers: Iterable[str] = ()) -> Costs:
    """Costs under which every op takes one microsecond and no workspace: for questions of bytes only."""
    prices = {signature(step, op): OpCost(1_000_000) for op in priced_calls(step)}
    links = {tier: Link(tier, tier, tier, 1e9, 1e9) for tier in tiers}
    return Costs("none", prices, links, source="every op a microsecond, no workspace")
