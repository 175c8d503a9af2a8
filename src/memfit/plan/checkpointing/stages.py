"""A step as a chain of stages between splittable vertices: what rotor's dynamic program works on.

The chain is a model. Transients and gradients are those of the keep plan at the same ops, and storages that are small
or cannot be recomputed are always there, so they are in no stage. Plans that come of it are judged by the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture.step import Kind as StorageKind
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
    outputs: tuple[int, ...]  # by stage but the last: the storage that the next one reads
    saved: tuple[tuple[int, ...], ...]  # by stage: the other storages that can be dropped
    backward_ops: tuple[int, ...]  # by stage: the first op of its backward

    @classmethod
    def of(cls, graph: StorageGraph, costs: Costs) -> Stages:
        step, reruns = graph.step, graph.reruns
        outputs = tuple(graph.storages[v - 1] for v in graph.splittable)
        ends = [reruns.writers[s][-1] for s in outputs] + [step.num_forward - 1]
        stage_of_op = _stages_of_ops(ends)
        droppable = [s for s, d in graph.decisions(frozenset()).items() if isinstance(d, Recompute)]
        saved: list[list[int]] = [[] for _ in ends]
        for storage in droppable:
            if storage not in outputs:
                saved[stage_of_op[reruns.writers[storage][-1]]].append(storage)
        keep = simulate(lower(step, {}, costs), costs)
        forward, backward, first_ops = _transients(keep, stage_of_op, outputs, saved)
        prices = costs.of(step)
        size = step.storage_bytes
        stages = []
        for i in range(len(ends)):
            output = size[outputs[i]] if i < len(outputs) else 0
            needed = sum(size[s] for s in saved[i] if step.storage[s].first_backward is not None)
            stages.append(
                Stage(
                    forward_ps=sum(prices[op].time_ps for op in range(step.num_forward) if stage_of_op[op] == i),
                    backward_ps=backward[i][1],
                    output_bytes=output,
                    saved_bytes=output + needed,
                    forward_transient_bytes=forward[i],
                    backward_transient_bytes=backward[i][0],
                )
            )
        return cls(graph, Chain(tuple(stages)), outputs, tuple(map(tuple, saved)), tuple(first_ops))

    def decisions(self, operations: tuple[Operation, ...]) -> dict[int, Decision]:
        """Carry out a schedule: keep what the first forward pass keeps, hold the rest from when a later pass does."""
        made = self.graph.decisions(frozenset())
        next_backward = len(self.saved) - 1
        decided: dict[int, Decision] = {}
        is_first_pass = True
        for position, (kind, stage) in enumerate(operations):
            if kind is Kind.BACKWARD:
                next_backward, is_first_pass = stage - 1, False
                continue
            now = Keep() if is_first_pass else Recompute(self.backward_ops[next_backward])
            if kind is Kind.FORWARD_ALL:
                for storage in self.saved[stage]:
                    decided.setdefault(storage, now)
            if stage < len(self.outputs) and (kind is Kind.FORWARD_ALL or _is_read_on(operations, position)):
                decided.setdefault(self.outputs[stage], now)
        return made | decided


def _is_read_on(operations: tuple[Operation, ...], position: int) -> bool:
    """True if the output of the forward at that position stays as the input of the one that follows."""
    following = operations[position + 1] if position + 1 < len(operations) else None
    return (
        following is not None
        and following.stage == operations[position].stage + 1
        and following.kind in (Kind.FORWARD_CHECKPOINT, Kind.FORWARD_ALL)
    )


def _stages_of_ops(ends: list[int]) -> list[int]:
    """For each forward op its stage."""
    found, stage = [], 0
    for op in range(ends[-1] + 1):
        while op > ends[stage]:
            stage += 1
        found.append(stage)
    return found


def _transients(
    keep: Timeline, stage_of_op: list[int], outputs: tuple[int, ...], saved: list[list[int]]
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """By stage: what forward needs for a while; what backward does, and how long it takes; its first backward op."""
    step = keep.program.step
    stage_of = {s: i for i, storages in enumerate(saved) for s in storages}
    stage_of |= {s: i for i, s in enumerate(outputs)}
    forward = [0] * len(saved)
    backward = [(0, 0)] * len(saved)
    first_ops = [step.num_forward] * len(saved)
    stage = len(saved) - 1
    for entry, start_ps, end_ps in zip(keep.ledger.entries, keep.starts_ps, keep.ends_ps, strict=True):
        if not isinstance(entry.instruction, Run):
            continue
        op = entry.instruction.op
        passing = entry.bytes[_TRANSIENT] + entry.workspace_bytes
        if op < step.num_forward:
            forward[stage_of_op[op]] = max(forward[stage_of_op[op]], passing)
            continue
        read = [stage_of[step.values[v].storage] for v in step.ops[op].reads() if step.values[v].storage in stage_of]
        if read and max(read) < stage:
            first_ops[max(read) : stage] = [op] * (stage - max(read))
            stage = max(read)
        most, total_ps = backward[stage]
        backward[stage] = (max(most, passing), total_ps + end_ps - start_ps)
    return forward, backward, first_ops
