"""What encoding storages of a Step changes: new things to hold, other prices, readers that no longer read.

Codes are written into the step all at once (plan/encode.py), and what that did is told apart storage by storage. Which
of them a plan takes up is open, so whatever cannot be told apart is taken to be in the plan's favour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memfit.capture.step import Op, Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decisions, Encode, EncodeThenOffload
from memfit.plan.encode import encode_step
from memfit.plan.rerun import Reruns


@dataclass(frozen=True)
class Coding:
    """One code that a storage may have.

    Attributes:
        first_use: the first op of the step that is served by it, for which it is here or fetched; None where other
            codes may change which op that is.
        last_use: the last op of the step that is served by it.
        held_to: the last op of the step during which it is held. Decoded for the last time, it is gone before the op
            that it is decoded for.
        on_code: the ops that read the code as it is, decoded for nobody.
        can_be_sent: of several codes only the first can be sent away.
    """

    storage: int
    num_bytes: int
    encode_ps: int
    first_use: int | None
    last_use: int
    held_to: int
    on_code: frozenset[int]
    can_be_sent: bool


@dataclass(frozen=True)
class Codings:
    """All codes of a step, beside the step without any; ops and storages have its numbers.

    Attributes:
        touches: for each op the storages that it uses, decoded or not, whichever codes there are.
        added_ps: for each storage what the step takes longer if it is encoded; may be below zero.
        longer_ps: of that, what can only make the backward half longer.
        gone: ops that are not in the step for some choice of codes, or that read what nobody can say.
        sure_ps: what all codes together may save beyond that; not above zero.
    """

    touches: tuple[frozenset[int], ...]
    codes: tuple[Coding, ...] = ()
    added_ps: dict[int, int] = field(default_factory=dict)
    longer_ps: dict[int, int] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    sure_ps: int = 0

    @classmethod
    def of(cls, step: Step, costs: Costs, codes: Decisions, reruns: Reruns, op_ps: Sequence[int]) -> Codings:
        """What these codes would change; `op_ps` is what each op of the step takes at least."""
        plain = tuple(frozenset(touched) for touched in reruns.touches)
        chosen = {s: d for s, d in codes.items() if isinstance(d, (Encode, EncodeThenOffload))}
        if not chosen:
            return cls(plain)
        encoded = encode_step(step, {s: Encode(d.codec, d.as_in) for s, d in chosen.items()})
        return _Comparison(step, encoded.step, costs, frozenset(encoded.codes), plain, op_ps).codings()


class _Comparison:
    """A step beside the same step with all codes in it."""

    def __init__(
        self,
        step: Step,
        encoded: Step,
        costs: Costs,
        coded: frozenset[int],
        plain: tuple[frozenset[int], ...],
        op_ps: Sequence[int],
    ) -> None:
        self.step, self.encoded, self.coded, self.plain, self.op_ps = step, encoded, coded, plain, op_ps
        self.original = _matched(step, encoded)
        self.code_of: dict[int, int] = {}  # a code's storage -> what it encodes
        self.decoded_from: dict[int, int] = {}  # a decoded copy's storage -> the code's storage
        for op, original in zip(encoded.ops, self.original, strict=True):
            if original is None and op.target != "memfit.view":
                read, made = (encoded.values[v].storage for v in (next(op.reads()), op.made[0]))
                if op.target == "memfit.encode":
                    self.code_of[made] = read
                else:
                    self.decoded_from[made] = read

        about = [index for index, op in enumerate(encoded.ops) if self._touched(op) & self.code_of.keys()]
        priced = replace(encoded, ops=tuple(encoded.ops[index] for index in about))
        prices = costs.picking({}).of(priced)
        # By number in the encoded step, of ops that are about a code.
        self.new_ps = {index: price.time_ps for index, price in zip(about, prices, strict=True)}

    def _touched(self, op: Op) -> set[int]:
        return {self.encoded.values[v].storage for v in (*op.reads(), *op.made)}

    def codings(self) -> Codings:
        touches: list[frozenset[int]] = [frozenset()] * len(self.step.ops)
        on_code: dict[int, set[int]] = {code: set() for code in self.code_of}
        first_use: dict[int, int] = {}
        last_use = dict.fromkeys(self.code_of, -1)
        left: set[int] = set()
        tangled: set[int] = set()  # ops that two codes are about: which of them it reads depends on the others
        for op, original in zip(self.encoded.ops, self.original, strict=True):
            if original is None:
                continue
            left.add(original)
            touched = self._touched(op)
            read_codes = touched & self.code_of.keys()
            served = read_codes | {self.decoded_from[s] for s in touched & self.decoded_from.keys()}
            for code in served:
                first_use.setdefault(code, original)
                last_use[code] = original
            if read_codes and len(self.plain[original] & self.coded) > 1:
                tangled.add(original)
            for code in read_codes:
                on_code[code].add(original)
            touches[original] = self.plain[original] & (touched | {self.code_of[code] for code in served})
        removed = set(range(len(self.step.ops))) - left
        added_ps, longer_ps, sure_ps = self._times(removed, tangled)
        for op_index in tangled:
            touches[op_index] = frozenset()
        first_of: dict[int, int] = {}
        for code, storage in self.code_of.items():
            first_of.setdefault(storage, code)
        held_to = self._held_to()
        codes = tuple(
            Coding(
                self.code_of[code],
                self.encoded.storage_bytes[code],
                encode_ps,
                None if first_use.get(code) in tangled else first_use.get(code),
                last_use[code],
                held_to.get(code, -1),
                frozenset(on_code[code]),
                first_of[self.code_of[code]] == code,
            )
            for code, encode_ps in self._encode_ps().items()
        )
        return Codings(tuple(touches), codes, added_ps, longer_ps, frozenset(removed | tangled), sure_ps)

    def _held_to(self) -> dict[int, int]:
        """By code the last op of the step during which it is there: it ends with the last op that reads it."""
        found: dict[int, int] = {}
        following = len(self.step.ops)  # the op of the step that runs next
        for op, original in zip(reversed(self.encoded.ops), reversed(self.original), strict=True):
            following = following if original is None else original
            for code in {self.encoded.values[v].storage for v in op.reads()} & self.code_of.keys():
                found.setdefault(code, following - 1 if original is None else original)
        return found

    def _encode_ps(self) -> dict[int, int]:
        values = self.encoded.values
        return {
            values[op.made[0]].storage: self.new_ps[index]
            for index, (op, original) in enumerate(zip(self.encoded.ops, self.original, strict=True))
            if original is None and op.target == "memfit.encode"
        }

    def _times(self, removed: set[int], tangled: set[int]) -> tuple[dict[int, int], dict[int, int], int]:
        """What each storage's codes add, what of that makes backward longer, and what all may save besides."""
        added, longer = dict.fromkeys(self.coded, 0), dict.fromkeys(self.coded, 0)
        entangled = {s for index in tangled for s in self.plain[index] & self.coded}
        sure_ps = -sum(self.op_ps[index] for index in tangled)
        for index, (op, original) in enumerate(zip(self.encoded.ops, self.original, strict=True)):
            touched = self._touched(op)
            codes = touched & self.code_of.keys()
            if not codes or original in tangled:
                continue
            storage = self.code_of[min(codes)]
            change_ps = self.new_ps[index] - (0 if original is None else self.op_ps[original])
            if storage not in entangled or change_ps < 0:
                added[storage] += change_ps  # of entangled ones nobody knows which ops there will be
            if op.target != "memfit.encode":
                longer[storage] += max(change_ps, 0)
        for index in removed - tangled:
            storages = self.plain[index] & self.coded
            if storages:
                added[min(storages)] -= self.op_ps[index]
            else:
                sure_ps -= self.op_ps[index]
        return added, longer, sure_ps


def _matched(step: Step, encoded: Step) -> list[int | None]:
    """For each op of the encoded step its number in the step, None for those that were put in."""
    found: list[int | None] = []
    at = 0
    for op in encoded.ops:
        if op.made and all(value >= len(step.values) for value in op.made):
            found.append(None)
            continue
        while not _is_same(step.ops[at], op):
            at += 1
        found.append(at)
        at += 1
    return found


def _is_same(op: Op, encoded: Op) -> bool:
    return (op.outputs, op.writes, op.half, op.path) == (encoded.outputs, encoded.writes, encoded.half, encoded.path)
