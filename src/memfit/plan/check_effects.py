"""What each op of a step does to storages, for the checker: read straight off the step, one op after the other.

[Note: versions]
The version of a storage counts the ops that have written it, the op that made it included. A source comes with version
0; a storage that an op makes has version 1 right after. In the step's own order every op meets each of its operands at
one version. A program may free a storage, make it again and bring it back, but each op must meet the versions it met in
the step: then it reads the same bytes, since the same ops wrote them in the same order. That argument needs every write
to be checked too, and it is: whoever writes a storage must meet it at the right version.

[Note: batch norm again]
In training, batch norm moves its running statistics and does not read them for its result. Run again, it gets None for
both: it neither reads nor writes them. If it names another op to be run in its place, that makes its first result
alone, and reads the input, the affine parameters and its own other results, the statistics of the batch. In evaluation
it reads its running statistics and writes nothing, although a step may list them among its writes. The functional forms
return the moved statistics, so they read them like any other operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memfit.capture.step import Op, Step, refs_in
from memfit.torch_internals import argument_names, normalised

_BATCH_NORMS = frozenset(
    {
        "native_batch_norm",
        "_native_batch_norm_legit",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_batch_norm_with_update",
    }
)
_STATISTICS = frozenset({"running_mean", "running_var"})
_NORMALISED_BY = ("input", "weight", "bias")


@dataclass(frozen=True, slots=True)
class Effect:
    """What one run of an op does to storages.

    Attributes:
        reads: each storage that must be here, with the version it must have. What is written is among them, and what
            the op's results look at.
        writes: each storage that is written in place, with the version it then has.
        makes: the storages that are new; they have version 1 then.
    """

    reads: Mapping[int, int]
    writes: Mapping[int, int]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Effects:
    """What every op of the step does.

    Attributes:
        first: by op, when it runs in its turn.
        again: by op, when it is run again.
        maker: for each storage that the step makes, the op that does.
        final: for each storage its version when every op has run.
    """

    first: tuple[Effect, ...]
    again: tuple[Effect, ...]
    maker: Mapping[int, int]
    final: Mapping[int, int]


def effects_of(step: Step) -> Effects:
    """Follow the versions of all storages through the step, in its own order."""
    versions = {step.values[source.value].storage: 0 for source in step.sources}
    maker: dict[int, int] = {}
    first: list[Effect] = []
    again: list[Effect] = []
    for index, op in enumerate(step.ops):
        effect = _effect(step, op, versions, again=False)
        first.append(effect)
        again.append(_effect(step, op, versions, again=True))
        maker |= dict.fromkeys(effect.makes, index)
        versions |= effect.writes
        versions |= dict.fromkeys(effect.makes, 1)
    return Effects(tuple(first), tuple(again), maker, versions)


def _effect(step: Step, op: Op, versions: Mapping[int, int], *, again: bool) -> Effect:
    """What the op does where the storages have these versions."""
    if again and op.again:
        return _from_own_results(step, op, versions)
    moves_statistics = _is_batch_norm(op) and _is_training(op)
    unread = _STATISTICS if again and moves_statistics else frozenset()
    unwritten = _of_statistics(step, op) if _is_batch_norm(op) and (again or not moves_statistics) else frozenset()

    results = dict.fromkeys(step.values[value].storage for value in op.made)
    makes = tuple(storage for storage in results if storage not in versions)
    writes = [storage for storage in op.writes if storage not in makes and storage not in unwritten]
    reads = [step.values[value].storage for value in _operands(op, without=unread)]
    looked_at = [storage for storage in results if storage in versions]
    # A storage without a version is one that nothing has made: no program can have it here, so 0 is never met.
    return Effect(
        reads={storage: versions.get(storage, 0) for storage in (*reads, *writes, *looked_at)},
        writes={storage: versions.get(storage, 0) + 1 for storage in writes},
        makes=makes,
    )


def _from_own_results(step: Step, op: Op, versions: Mapping[int, int]) -> Effect:
    """A batch norm whose first result is made from the other two, which it makes only when it runs in its turn."""
    named = normalised(op.target, op.args, op.kwargs)
    operands = [value for name in _NORMALISED_BY for value in refs_in(named.get(name))]
    statistics = {step.values[value].storage for value in op.made[1:]}
    return Effect(
        reads={s: versions.get(s, 0) for s in (step.values[value].storage for value in operands)}
        | dict.fromkeys(statistics, 1),
        writes={},
        makes=tuple(s for s in (step.values[op.made[0]].storage,) if s not in versions),
    )


def _operands(op: Op, *, without: frozenset[str]) -> Iterator[int]:
    """The values the op takes, but for the arguments of these names."""
    names = {str(position): name for position, name in enumerate(argument_names(op.target))} if without else {}
    for label, arg in op.operands():
        if names.get(label, label) not in without:
            yield from refs_in(arg)


def _is_batch_norm(op: Op) -> bool:
    namespace, _, rest = op.target.partition(".")
    return namespace == "aten" and rest.partition(".")[0] in _BATCH_NORMS


def _is_training(op: Op) -> bool:
    """What a batch norm's flag says; the forms without a flag always train."""
    return bool(normalised(op.target, op.args, op.kwargs).get("training", True))


def _of_statistics(step: Step, op: Op) -> frozenset[int]:
    """The storages of a batch norm's running statistics."""
    named = normalised(op.target, op.args, op.kwargs)
    return frozenset(step.values[value].storage for name in _STATISTICS for value in refs_in(named.get(name)))
