"""Prove that a program computes its step: every op reads what it read in the step, nothing is lost, nothing is left.

    proof = check(program, workspace_bytes=[...], peak_bytes=plan.peak_bytes)

The checker walks the instructions once and keeps its own books: which storages are here, what they hold (see [Note:
versions] in check_effects.py), what travels, what lies in a tier. It shares no code with what makes programs or
predicts their peaks, so a mistake there does not repeat itself here. It knows bytes and order, not time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, assert_never

from memfit.capture.step import Half, Origin, Step
from memfit.errors import BadOption
from memfit.plan.check_effects import Effect, effects_of
from memfit.plan.check_rules import IllegalProgram, Rule
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Instruction,
    Program,
    Run,
    SendStart,
    SendWait,
)

__all__ = ["IllegalProgram", "Proof", "Rule", "check"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What the checker found of a legal program.

    Attributes:
        peak_bytes: the most bytes that are here during any one instruction, sources included.
        peak_index: the first instruction at which they are.
        live: the storages that are here in the end.
    """

    peak_bytes: int
    peak_index: int
    num_instructions: int
    num_reruns: int
    num_sends: int
    live: frozenset[int]


def check(program: Program, *, workspace_bytes: Sequence[int] | None = None, peak_bytes: int | None = None) -> Proof:
    """Raise IllegalProgram at the first instruction that breaks a rule; otherwise say what the program needs.

    Args:
        workspace_bytes: by op, what it holds beyond its operands and results while it runs.
        peak_bytes: the peak that somebody promised; any other is an error.
    """
    num_ops = len(program.step.ops)
    if workspace_bytes is not None and len(workspace_bytes) != num_ops:
        raise BadOption(f"workspace_bytes has {len(workspace_bytes)} entries, but the step has {num_ops} ops")
    proof = _Walk(program, [0] * num_ops if workspace_bytes is None else workspace_bytes).prove()
    if peak_bytes is not None and peak_bytes != proof.peak_bytes:
        raise IllegalProgram(
            Rule.PEAK,
            f"{peak_bytes} bytes were promised, but there are {proof.peak_bytes} at instruction {proof.peak_index}, "
            f"{program.instructions[proof.peak_index]}",
            index=len(program.instructions),
        )
    return proof


@dataclass(slots=True)
class _Held:
    """A storage that is here: its version, and whether it travels."""

    version: int
    sent_to: str | None = None
    is_arriving: bool = False


class _Walk:
    """The checker's books while it goes through a program."""

    def __init__(self, program: Program, workspace_bytes: Sequence[int]) -> None:
        self.program = program
        self.step = step = program.step
        self.workspace_bytes = workspace_bytes
        self.effects = effects_of(step)
        # - Who owns what
        self.sources = _storages_of_sources(step, tangents=False)
        self.tangents = _storages_of_sources(step, tangents=True) - self.sources
        self.outputs = {step.values[value].storage for value in step.outputs}
        self.first_parts = {step.values[gradient.value].storage for gradient in step.first_parts}
        self.last_gradient_on = {step.values[g.value].storage: index for index, g in enumerate(step.gradients)}
        self.last_part = {gradient.of: index for index, gradient in enumerate(step.gradients)}
        # - What is where
        self.live: dict[int, _Held] = {}
        self.live_bytes = 0
        self.copies: dict[tuple[int, str], int] = {}  # (storage, tier) -> version
        self.given_away: set[int] = set()
        # - How far it has come
        self.index = 0
        self.instruction: Instruction | None = None
        self.num_run = 0
        self.num_given = 0
        self.begun: set[int] = set()  # sources of which a part has been given
        self.num_reruns = 0
        self.num_sends = 0
        self.is_backward = False

    def prove(self) -> Proof:
        for storage in self.sources:
            self._hold(storage, version=0)
        peak_bytes, peak_index = self.live_bytes, 0
        for index, instruction in enumerate(self.program.instructions):
            self.index, self.instruction = index, instruction
            # What an instruction drops is still here while it runs; that was counted at the instruction before.
            extra_bytes = self._follow(instruction)
            during_bytes = self.live_bytes + extra_bytes
            if during_bytes > peak_bytes:
                peak_bytes, peak_index = during_bytes, index
        self.index, self.instruction = len(self.program.instructions), None
        self._check_end()
        return Proof(peak_bytes, peak_index, self.index, self.num_reruns, self.num_sends, frozenset(self.live))

    def _follow(self, instruction: Instruction) -> int:
        """Check one instruction and enter it into the books; return the bytes it holds only meanwhile."""
        match instruction:
            case Run(op, again):
                return self._run_again(op) if again else self._run(op)
            case Boundary():
                self._boundary()
            case Free(storage):
                self._free(storage)
            case SendStart(storage, tier):
                self._send(storage, tier)
            case SendWait(storage):
                self._end_send(storage)
            case FetchStart(storage, tier):
                self._fetch(storage, tier)
            case FetchWait(storage):
                self._end_fetch(storage)
            case Give(gradient):
                return self._give(gradient)
            case _:
                assert_never(instruction)
        return 0

    # --- ops ---------------------------------------------------------------------------------------------------------

    def _run(self, op: int) -> int:
        if not 0 <= op < len(self.step.ops):
            self._fail(Rule.ORDER, f"the step has {len(self.step.ops)} ops")
        if op < self.num_run:
            self._fail(Rule.ORDER, "the op has run already")
        if op > self.num_run:
            self._fail(Rule.ORDER, f"op {self.num_run}, {self.step.ops[self.num_run].target}, comes first")
        if (self.step.ops[op].half is Half.BACKWARD) is not self.is_backward:
            self._fail(Rule.ORDER, "a backward op runs before the boundary")
        self.num_run += 1
        return self._apply(op, self.effects.first[op])

    def _run_again(self, op: int) -> int:
        if not 0 <= op < len(self.step.ops):
            self._fail(Rule.RERUN, f"the step has {len(self.step.ops)} ops")
        if not self.is_backward:
            self._fail(Rule.RERUN, "an op is run again before the boundary")
        if self.step.ops[op].half is not Half.FORWARD:
            self._fail(Rule.RERUN, "a backward op is run again")
        if self.step.ops[op].random:
            self._fail(Rule.RERUN, "a random op is run again, it would draw other numbers")
        effect = self.effects.again[op]
        for storage in effect.writes:
            if storage in self.sources or storage in self.tangents:
                self._fail(Rule.RERUN, f"{self._name_of(storage)} would be written once more", storage)
        self.num_reruns += 1
        return self._apply(op, effect)

    def _apply(self, op: int, effect: Effect) -> int:
        """Check what the op meets, enter what it leaves behind; return what it holds only meanwhile."""
        for storage, version in effect.reads.items():
            self._check_read(storage, version)
        for storage, version in effect.writes.items():
            held = self.live[storage]
            if held.sent_to is not None:
                self._fail(Rule.SEND, f"it is written while it is being sent to '{held.sent_to}'", storage)
            held.version = version
        extra_bytes = self.workspace_bytes[op]
        for storage in effect.makes:
            if storage in self.live:
                # Kept from the first run: the new copy is dropped at once.
                extra_bytes += self.step.storage_bytes[storage]
            else:
                self._hold(storage, version=1)
        return extra_bytes

    def _check_read(self, storage: int, version: int) -> None:
        held = self.live.get(storage)
        if held is None:
            tiers = [tier for (sent, tier) in self.copies if sent == storage]
            self._fail(Rule.READ, f"it is read but is in '{tiers[0]}'" if tiers else "it is read but not here", storage)
        if held.is_arriving:
            self._fail(Rule.READ, "it is read before it has arrived", storage)
        if storage in self.given_away:
            self._fail(Rule.GIVEN, f"{self._name_of(storage)} is read after its last gradient is given", storage)
        if held.version != version:
            self._fail(Rule.VERSION, f"it has been written {held.version} times, in the step {version} times", storage)

    def _boundary(self) -> None:
        if self.is_backward:
            self._fail(Rule.ORDER, "there is a second boundary")
        if self.num_run < self.step.num_forward:
            self._fail(Rule.ORDER, f"op {self.num_run}, {self.step.ops[self.num_run].target}, comes first")
        self.is_backward = True
        for storage in self.tangents:
            self._hold(storage, version=0)

    # --- storages ----------------------------------------------------------------------------------------------------

    def _free(self, storage: int) -> None:
        self._check_exists(Rule.FREE, storage)
        if storage in self.sources:
            self._fail(Rule.FREE, f"{self._name_of(storage)} is freed, a source", storage)
        if storage in self.outputs:
            self._fail(Rule.FREE, "an output is freed", storage)
        if storage in self.first_parts:
            self._fail(Rule.FREE, "a gradient is freed that autograd keeps", storage)
        held = self.live.get(storage)
        if held is None:
            self._fail(Rule.FREE, "it is freed but not here", storage)
        if held.sent_to is not None:
            self._fail(Rule.FREE, f"it is freed while it is being sent to '{held.sent_to}'", storage)
        if held.is_arriving:
            self._fail(Rule.FREE, "it is freed before it has arrived", storage)
        last = self.last_gradient_on.get(storage, -1)
        if last >= self.num_given:
            self._fail(Rule.FREE, f"it is freed before gradient {last}, which looks at it, is given", storage)
        self._drop(storage)

    def _send(self, storage: int, tier: str) -> None:
        self._check_exists(Rule.SEND, storage)
        if storage in self.sources or storage in self.tangents:
            self._fail(Rule.SEND, f"{self._name_of(storage)} is sent, a source", storage)
        if storage in self.outputs:
            self._fail(Rule.SEND, "an output is sent", storage)
        if storage in self.last_gradient_on:
            self._fail(Rule.SEND, "a gradient is sent", storage)
        if self.effects.maker.get(storage, len(self.step.ops)) >= self.step.num_forward:
            self._fail(Rule.SEND, "it is sent, but the forward half does not make it", storage)
        held = self.live.get(storage)
        if held is None:
            self._fail(Rule.SEND, "it is sent but not here", storage)
        if held.is_arriving:
            self._fail(Rule.SEND, "it is sent before it has arrived", storage)
        if held.sent_to is not None:
            self._fail(Rule.SEND, f"it is being sent to '{held.sent_to}' already", storage)
        if (storage, tier) in self.copies:
            self._fail(Rule.SEND, f"'{tier}' holds a copy of it already", storage)
        held.sent_to = tier
        self.num_sends += 1

    def _end_send(self, storage: int) -> None:
        self._check_exists(Rule.SEND, storage)
        held = self.live.get(storage)
        if held is None or held.sent_to is None:
            self._fail(Rule.SEND, "its send is waited for, but none is under way", storage)
        self.copies[storage, held.sent_to] = held.version
        self._drop(storage)

    def _fetch(self, storage: int, tier: str) -> None:
        self._check_exists(Rule.FETCH, storage)
        held = self.live.get(storage)
        if held is not None and held.sent_to == tier:
            # It has not left: its sending is called off, and it is taken back as it is.
            held.sent_to, held.is_arriving = None, True
            return
        if held is not None:
            self._fail(Rule.FETCH, "it is fetched but here", storage)
        if (storage, tier) not in self.copies:
            self._fail(Rule.FETCH, f"it is fetched, but '{tier}' holds no copy of it", storage)
        self._hold(storage, version=self.copies.pop((storage, tier)), is_arriving=True)

    def _end_fetch(self, storage: int) -> None:
        self._check_exists(Rule.FETCH, storage)
        held = self.live.get(storage)
        if held is None or not held.is_arriving:
            self._fail(Rule.FETCH, "its fetch is waited for, but none is under way", storage)
        held.is_arriving = False

    # --- gradients, the end ------------------------------------------------------------------------------------------

    def _give(self, gradient: int) -> int:
        """Check a handing-over; autograd adds any but the first part of a gradient to the others in a new block."""
        if not 0 <= gradient < len(self.step.gradients):
            self._fail(Rule.GIVE, f"the step has {len(self.step.gradients)} gradients")
        storage = self._storage_of_gradient(gradient)
        if not self.is_backward:
            self._fail(Rule.GIVE, "a gradient is given before the boundary", storage)
        if gradient < self.num_given:
            self._fail(Rule.GIVE, "the gradient is given already", storage)
        if gradient > self.num_given:
            self._fail(Rule.GIVE, f"gradient {self.num_given} comes first", storage)
        final = self.effects.final.get(storage, 0)
        held = self.live.get(storage)
        if held is None:
            self._fail(Rule.GIVE, "the gradient is given but not here", storage)
        if held.version < final:
            self._fail(Rule.GIVE, f"the gradient is given after {held.version} of {final} writes", storage)
        self._check_read(storage, final)
        self.num_given += 1
        of = self.step.gradients[gradient].of
        if self.last_part[of] == gradient:
            self.given_away.add(self.step.values[of].storage)
        added_bytes = self.step.values[self.step.gradients[gradient].value].bytes if of in self.begun else 0
        self.begun.add(of)
        return added_bytes

    def _check_end(self) -> None:
        if not self.is_backward:
            self._fail(Rule.ORDER, "there is no boundary")
        if self.num_run < len(self.step.ops):
            self._fail(Rule.ORDER, f"op {self.num_run}, {self.step.ops[self.num_run].target}, has not run")
        if self.num_given < len(self.step.gradients):
            self._fail(Rule.GIVE, f"gradient {self.num_given} is not given", self._storage_of_gradient(self.num_given))
        for storage, held in self.live.items():
            if held.sent_to is not None:
                self._fail(Rule.END, f"its send to '{held.sent_to}' is never waited for", storage)
            if held.is_arriving:
                self._fail(Rule.END, "its fetch is never waited for", storage)
        for storage, tier in self.copies:
            self._fail(Rule.END, f"its copy is left in '{tier}'", storage)
        expected = self.sources | self.outputs | self.first_parts
        for storage in sorted(self.live.keys() ^ expected):
            self._fail(Rule.END, "it is left over" if storage in self.live else "it is missing", storage)

    # --- the books ---------------------------------------------------------------------------------------------------

    def _hold(self, storage: int, *, version: int, is_arriving: bool = False) -> None:
        self.live[storage] = _Held(version, is_arriving=is_arriving)
        self.live_bytes += self.step.storage_bytes[storage]

    def _drop(self, storage: int) -> None:
        del self.live[storage]
        self.live_bytes -= self.step.storage_bytes[storage]

    def _storage_of_gradient(self, gradient: int) -> int:
        return self.step.values[self.step.gradients[gradient].value].storage

    def _name_of(self, storage: int) -> str:
        names = [s.name for s in self.step.sources if self.step.values[s.value].storage == storage]
        return " and ".join(f"'{name}'" for name in names)

    def _check_exists(self, rule: Rule, storage: int) -> None:
        if not 0 <= storage < len(self.step.storage_bytes):
            self._fail(rule, f"the step has {len(self.step.storage_bytes)} storages")

    def _fail(self, rule: Rule, what: str, storage: int | None = None) -> NoReturn:
        index = self._op_in_question(storage)
        op = None if index is None else self.step.ops[index]
        raise IllegalProgram(
            rule,
            what,
            index=self.index,
            instruction=self.instruction,
            target=None if op is None else op.target,
            path=None if op is None else op.path,
            storage=storage,
            storage_bytes=None if storage is None else self.step.storage_bytes[storage],
        )

    def _op_in_question(self, storage: int | None) -> int | None:
        """The op that runs or, at other instructions, the one that made the storage."""
        if isinstance(self.instruction, Run):
            return self.instruction.op if 0 <= self.instruction.op < len(self.step.ops) else None
        return None if storage is None else self.effects.maker.get(storage)


def _storages_of_sources(step: Step, *, tangents: bool) -> frozenset[int]:
    return frozenset(
        step.values[source.value].storage for source in step.sources if (source.origin is Origin.TANGENT) is tangents
    )
