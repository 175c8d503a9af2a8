"""A captured step as Feng and Huang saw networks: one vertex per tensor that a layer leaves behind.

They wrote their graphs down network by network. The same graphs follow from a few rules on ops:

  in place    a storage is one vertex, whoever writes it: conv and ReLU, batch norm and ReLU, add and ReLU;
  no vertex   views, integers, a cat of one tensor, an average pool that keeps the size;
  dropout     belongs to the layer before it, and is a vertex only behind a pool;
  add         is a vertex, but what it alone reads is not: that is made on the way in (a residual's last batch norm);
  long cats   a cat that begins with all that an earlier cat had reads that cat, which is how DenseNets are drawn;
  loss        from the logits on everything is the target.

Weights are elements. Only floating-point tensors on a path from an input to the loss count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.capture.needs import Need
from memfit.capture.schemas import operand_needs
from memfit.capture.step import Op, Origin, Step, refs_in
from memfit.plan.checkpointing.graph import BadGraph, Graph

_SOURCE = 0
_ADDS = ("aten.add.", "aten.add_.")
_CAT = "aten.cat."
_LOG_SOFTMAX = "aten._log_softmax"
_DROPOUT = "aten.native_dropout"


@dataclass
class _Draft:
    """A tensor that depends on an input, before it is known whether it will be a vertex."""

    weight: int
    name: str
    written: int  # the last op that writes it; drafts are read only after that
    reads: list[int]
    adds: bool = False  # a sum of several tensors
    pools: bool = False
    hidden: bool = False  # no vertex: its readers read what it reads
    ends: bool = False  # may belong to the loss


def paper_graph(step: Step) -> Graph:
    """The graph of a step's forward half at the paper's granularity; for steps as captured, without rewrites."""
    drafting = _Drafting(step)
    for index, op in enumerate(step.ops[: step.num_forward]):
        drafting.add(index, op)
    drafts = drafting.drafts
    _bypass_hidden(drafts)
    outputs = {drafting.at[s] for value in step.outputs if (s := step.values[value].storage) in drafting.at}
    useful = _leading_to(drafts, outputs)
    if _SOURCE not in useful:
        raise BadGraph(f"no output of {step.name or 'this step'} depends on an input")
    readers = _readers(drafts, useful)
    loss = _loss(drafts, outputs, useful, readers)
    for number in useful - loss - {_SOURCE}:
        only = readers[number][0]
        drafts[number].hidden = not drafts[number].adds and len(readers[number]) == 1 and drafts[only].adds
    _bypass_hidden(drafts)
    return _numbered(drafts, useful, loss)


class _Drafting:
    """Goes through the forward ops and keeps for every storage the draft that it holds now."""

    def __init__(self, step: Step) -> None:
        self.values = step.values
        inputs = [source.value for source in step.sources if source.origin is Origin.INPUT]
        self.drafts = [_Draft(sum(self.values[v].num_elements for v in inputs), "input", -1, [])]
        self.at = {self.values[value].storage: _SOURCE for value in inputs}
        # Batch norm writes its running statistics: parameters and buffers lead nowhere.
        self._given = {self.values[source.value].storage for source in step.sources} - self.at.keys()
        self._seen = {*self.at, *self._given}
        self._noise: set[int] = set()
        self._read = {_SOURCE}
        self._cats: dict[tuple[int, ...], int] = {}

    def add(self, index: int, op: Op) -> None:
        """Take in one op: new drafts, another writing of an old one, or nothing."""
        made = [value for value in op.made if self.values[value].storage not in self._seen]
        self._seen.update(self.values[value].storage for value in made)
        written = [storage for storage in op.writes if storage not in self._given]
        # By what is truly read: a mask made by empty_like(x) does not depend on x.
        taken = [value for _, value, need in operand_needs(op, self.values) if need is not Need.SHAPE]
        reads = self._reads(op, taken)
        if not reads:
            if op.random:
                self._noise.update(written, (self.values[value].storage for value in made))
            return
        adds = op.target.startswith(_ADDS) and len(reads) > 1
        for value in made:
            self._make(index, op, value, taken, reads, adds)
        for storage in written:
            self._write(index, op, storage, reads, adds)
        if made or written:
            self._read.update(set(reads) - {self.at.get(storage) for storage in written})
        if op.target.startswith(_CAT) and made:
            self._cats[_cat_key(op)] = self.at[self.values[made[0]].storage]

    def _reads(self, op: Op, taken: Iterable[int]) -> list[int]:
        """The drafts an op reads, each once; a long cat reads the shorter one before it."""
        shorter: list[int] = []
        if op.target.startswith(_CAT):
            key = _cat_key(op)
            known = (length for length in range(len(key) - 1, 1, -1) if key[:length] in self._cats)
            length = next(known, None)
            if length is not None:
                shorter, taken = [self._cats[key[:length]]], key[length:]
        storages = (self.values[value].storage for value in taken)
        return list(dict.fromkeys([*shorter, *(self.at[storage] for storage in storages if storage in self.at)]))

    def _make(self, index: int, op: Op, value: int, taken: list[int], reads: list[int], adds: bool) -> None:
        draft = _Draft(self.values[value].num_elements, _name(op), index, reads, adds)
        draft.pools = _is_pool(op)
        draft.hidden = self._hides(op, value, taken, reads)
        draft.ends = op.target.startswith(_LOG_SOFTMAX) or draft.weight == 1
        self._put(self.values[value].storage, draft)

    def _put(self, storage: int, draft: _Draft) -> None:
        self.at[storage] = len(self.drafts)
        self.drafts.append(draft)

    def _write(self, index: int, op: Op, storage: int, reads: list[int], adds: bool) -> None:
        """Write in place: still the same vertex, unless someone has read it before, or others are added to it."""
        number = self.at.get(storage)
        if number is None or number in self._read or adds:
            looks = (self.values[value] for value in (*op.reads(), *op.made))
            weight = max(look.num_elements for look in looks if look.storage == storage)
            self._put(storage, _Draft(weight, _name(op), index, reads, adds))
            return
        draft = self.drafts[number]
        draft.reads = [*draft.reads, *(read for read in reads if read != number)]
        draft.written = index

    def _hides(self, op: Op, value: int, taken: list[int], reads: list[int]) -> bool:
        """Whether what an op makes is no vertex."""
        made = self.values[value]
        if not made.dtype.is_floating_point:
            return True
        if len(reads) > 1:
            return False
        if op.target.startswith(_DROPOUT) or any(self.values[v].storage in self._noise for v in taken):
            before = self.drafts[reads[0]]
            return not before.pools
        if op.target.startswith(_CAT):
            return len(_cat_key(op)) == 2
        return _is_pool(op) and "avg" in op.target and any(self.values[v].shape == made.shape for v in taken)


def _is_pool(op: Op) -> bool:
    # An average pool down to one element is dispatched as a mean.
    return "_pool" in op.target or op.target == "aten.mean.dim"


def _cat_key(op: Op) -> tuple[int, ...]:
    """The dimension and the values of a cat: the key of a longer cat begins with that of a shorter one."""
    dim = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)
    return (int(dim), *refs_in(op.args[0]))


def _name(op: Op) -> str:
    kind = op.target.split(".")[1].strip("_")
    return f"{op.path}: {kind}" if op.path else kind


def _bypass_hidden(drafts: list[_Draft]) -> None:
    """Let whoever reads a hidden draft read what that one reads."""
    through: dict[int, list[int]] = {}
    for number in sorted(range(len(drafts)), key=lambda n: drafts[n].written):
        draft = drafts[number]
        draft.reads = list(dict.fromkeys(r for read in draft.reads for r in through[read]))
        through[number] = draft.reads if draft.hidden else [number]


def _leading_to(drafts: list[_Draft], outputs: Iterable[int]) -> set[int]:
    """The outputs and all that they depend on."""
    found: set[int] = set()
    waiting = list(outputs)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += drafts[number].reads
    return found


def _readers(drafts: list[_Draft], useful: set[int]) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = defaultdict(list)
    for number in sorted(useful):
        for read in drafts[number].reads:
            readers[read].append(number)
    return readers


def _loss(drafts: list[_Draft], outputs: set[int], useful: set[int], readers: dict[int, list[int]]) -> set[int]:
    """What is the target: the outputs, the loss that leads to them, and the logits if it reads but one tensor."""
    loss = set(outputs)
    for number in sorted(useful - {_SOURCE}, key=lambda n: -drafts[n].written):
        if drafts[number].ends and loss.issuperset(readers[number]):
            loss.add(number)
    logits = {read for number in loss for read in drafts[number].reads} - loss - {_SOURCE}
    if len(logits) == 1 and all(drafts[n].ends for n in loss) and loss.issuperset(*(readers[n] for n in logits)):
        loss |= logits
    return loss


def _numbered(drafts: list[_Draft], useful: set[int], loss: set[int]) -> Graph:
    """The graph of what is left, in the order of the last writing; all of the loss is the last vertex."""
    order = sorted((n for n in useful - loss if not drafts[n].hidden), key=lambda n: (drafts[n].written, n))
    target = len(order)
    place = {number: index for index, number in enumerate(order)} | dict.fromkeys(loss, target)
    edges = {(place[read], place[number]) for number in (*order, *loss) for read in drafts[number].reads}
    edges = {(start, end) for start, end in edges if start != end}
    if len(edges) > 1:
        edges.discard((0, target))  # the labels: nothing lies on their way
    first = min(loss, key=lambda n: drafts[n].written)
    kept = [drafts[number] for number in (*order, first)]
    return Graph(tuple(d.weight for d in kept), tuple(sorted(edges)), tuple(d.name for d in kept))
