"""A step as a chain of stages between the boundaries of its graph: what rotor's dynamic program works on.

The chain is a model. Transients and gradients are those of the keep plan at the same ops, and storages that are small
or cannot be recomputed are always there, so they are in no stage. A storage that several boundaries share belongs to
the stage that makes it, and is counted with each of those boundaries that is kept alone: too much if several are. Plans
that come of it are judged by the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture.step import Kind as StorageKind
from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.rotor import Chain, Kind, Operation, Stage
from memfit.plan.checkpointing.storage_graph import StorageGraph
from memfit.plan.decisions import Decision, Keep, Recompute
from memfit.plan.ledger import KINDS
from memfit.plan.lower import lower
from memfit.plan.program import Run
from memfit.plan.simulate import Timeline, simulate

_SAVED, _TRANSIENT = KINDS.index(StorageKind.SAVED), KINDS.index(StorageKind.TRANSIENT)


@dataclass(frozen=True)
class Stages:
    """The chain, and which storages belong to which of its stages."""

    graph: StorageGraph
    chain: Chain
    outputs: tuple[tuple[int, ...], ...]  # by stage: the storages that the next one reads, or passes on
    made: tuple[tuple[int, ...], ...]  # by stage: the storages that it makes and that can be dropped
    backward_ops: tuple[int, ...]  # by stage: the first op of its backward

    @classmethod
    def of(cls, graph: StorageGraph, costs: Costs) -> Stages:
        step, reruns = graph.step, graph.reruns
        droppable = [s for s, d in graph.decisions(frozenset()).items() if isinstance(d, Recompute)]
        read_on = ({graph.storages[v - 1] for v in boundary} for boundary in graph.boundaries.values())
        outputs = [*(tuple(s for s in droppable if s in storages) for storages in read_on), ()]
        ends = [reruns.writers[graph.storages[v - 1]][-1] for v in graph.boundaries] + [step.num_forward - 1]
        stage_of_op = _stages_of_ops(ends)
        made: list[list[int]] = [[] for _ in ends]
        for storage in droppable:
            made[stage_of_op[reruns.writers[storage][-1]]].append(storage)
        keep = simulate(lower(step, {}, costs), costs)
        forward, backward, first_ops = _transients(keep, stage_of_op, made)
        forward_ps = [0] * len(ends)
        for stage, price in zip(stage_of_op, costs.of(step), strict=False):
            forward_ps[stage] += price.time_ps
        size = step.storage_bytes
        stages = []
        for i, output in enumerate(outputs):
            held = {s for s in made[i] if s in output or step.storage[s].first_backward is not None}
            stages.append(
                Stage(
                    forward_ps=forward_ps[i],
                    backward_ps=backward[i][1],
                    output_bytes=sum(size[s] for s in output),
                    saved_bytes=sum(size[s] for s in held),
                    forward_transient_bytes=forward[i],
                    backward_transient_bytes=backward[i][0],
                    carried_bytes=sum(size[s] for s in output if s not in held),
                )
            )
        return cls(graph, Chain(tuple(stages)), tuple(outputs), tuple(map(tuple, made)), tuple(first_ops))

    def decisions(self, operations: tuple[Operation, ...]) -> dict[int, Decision]:
        """Carry out a schedule: keep what the first forward pass keeps, hold the rest from when a later pass does."""
        stage_of = {storage: stage for stage, storages in enumerate(self.made) for storage in storages}
        next_backward = len(self.made) - 1
        decided: dict[int, Decision] = {}
        is_first_pass = True
        passed: set[int] = set()  # stages that ran again before
        for position, (kind, stage) in enumerate(operations):
            if kind is Kind.BACKWARD:
                next_backward, is_first_pass = stage - 1, False
                continue
            following = operations[position + 1] if position + 1 < len(operations) else None
            held = list(self.made[stage]) if kind is Kind.FORWARD_ALL else []
            if following == (Kind.FORWARD_ALL, stage + 1):
                held += self.outputs[stage]
            if is_first_pass:
                # A stage that keeps all is not run again: of it and of its input nobody but backward reads anything.
                held = [s for s in held if self.graph.step.storage[s].first_backward is not None]
            if following == (Kind.FORWARD_CHECKPOINT, stage + 1):
                held += self.outputs[stage]
            for storage in held:
                # Made again for the first time it needs no date: plans without any are evaluated far faster.
                again = Recompute(self.backward_ops[next_backward] if stage_of[storage] in passed else 0)
                decided.setdefault(storage, Keep() if is_first_pass else again)
            if not is_first_pass:
                passed.add(stage)
        return self.graph.decisions(frozenset()) | decided


def _stages_of_ops(ends: list[int]) -> list[int]:
    """For each forward op its stage."""
    found, stage = [], 0
    for op in range(ends[-1] + 1):
        while op > ends[stage]:
            stage += 1
        found.append(stage)
    return found


def _stages_of_backward_ops(step: Step, made: list[list[int]]) -> list[int]:
    """For each backward op its stage: the last of which it or a later op reads anything."""
    stage_of = {s: i for i, storages in enumerate(made) for s in storages}
    found, stage = [], 0
    for op in reversed(step.ops[step.num_forward :]):
        read = (stage_of.get(step.values[v].storage, 0) for v in op.reads())
        stage = max(stage, *read, 0)
        found.append(stage)
    return found[::-1]


def _transients(
    keep: Timeline, stage_of_op: list[int], made: list[list[int]]
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """By stage: what forward needs for a while; what backward does, and how long it takes; its first backward op."""
    step = keep.program.step
    stages = [*stage_of_op, *_stages_of_backward_ops(step, made)]
    forward = [0] * len(made)
    backward = [(0, 0)] * len(made)
    first_ops = [step.num_forward] * len(made)
    stage = len(made) - 1
    for entry, start_ps, end_ps in zip(keep.ledger.entries, keep.starts_ps, keep.ends_ps, strict=True):
        if not isinstance(entry.instruction, Run):
            continue
        op = entry.instruction.op
        passing = entry.bytes[_TRANSIENT] + entry.workspace_bytes
        if op < step.num_forward:
            forward[stages[op]] = max(forward[stages[op]], passing)
            continue
        first_ops[stages[op] : stage] = [op] * (stage - stages[op])
        stage = stages[op]
        most, total_ps = backward[stage]
        backward[stage] = (max(most, passing), total_ps + end_ps - start_ps)
    return forward, backward, first_ops
