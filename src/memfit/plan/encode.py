"""Write Encode decisions into the Step: an op that encodes after the last forward use, one that decodes for backward.

Afterwards the code is a storage like any other, which can be kept, offloaded or recomputed, and the encoded storage is
one that backward does not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from memfit.capture.needs import Need, gate_of
from memfit.capture.rewrites.draft import Draft
from memfit.capture.schemas import operand_needs, visible_arguments
from memfit.capture.step import Ghost, Half, Op, Ref, Step, Value, map_refs
from memfit.codecs.bounds import bounds_of
from memfit.codecs.codec import Reading
from memfit.codecs.pool import pool_of
from memfit.codecs.registry import LOSSLESS_NAMES, codec
from memfit.errors import BadOption
from memfit.plan.decisions import Decision, Decisions, Encode, EncodeThenOffload, Moments, Offload, Recompute


@dataclass(frozen=True)
class Encoded:
    """The step with codes in it, and the decisions that are left for it."""

    step: Step
    decisions: dict[int, Decision]
    code_of: dict[int, int]


@dataclass(frozen=True)
class _Candidate:
    """A storage that could be encoded: the value that stands for all of it, and its backward uses."""

    value: Value
    readings: tuple[Reading, ...]


def encode_step(step: Step, decisions: Decisions) -> Encoded:
    """Write every Encode and EncodeThenOffload into the step; a step without any comes back as it is."""
    chosen = {s: d for s, d in decisions.items() if isinstance(d, (Encode, EncodeThenOffload))}
    left = {s: d for s, d in decisions.items() if s not in chosen}
    if not chosen:
        return Encoded(step, left, {})
    draft = Draft(step)
    codes: dict[int, int] = {}
    for storage, decision in sorted(chosen.items()):
        candidate = _candidate(step, storage)
        why = why_not_encode(step, storage, decision.codec)
        if why or isinstance(candidate, str):
            known = step.storage.get(storage)
            size = "" if known is None else f" ({known.bytes:,} bytes, {_maker(step, storage)})"
            raise BadOption(f"storage {storage}{size} cannot be encoded as '{decision.codec}': {why}")
        code = _insert(draft, step, storage, candidate, decision.codec)
        codes[storage] = code.storage
        if isinstance(decision, EncodeThenOffload):
            left[code.storage] = Offload(decision.tier)
    encoded = draft.close()
    number = draft.renumbered(encoded)
    return Encoded(encoded, {s: _renumbered(d, number, encoded.num_forward) for s, d in left.items()}, codes)


def _renumbered(decision: Decision, number: list[int], num_forward: int) -> Decision:
    """The decision with the numbers that ops have now."""
    match decision:
        case Recompute(held_from) if held_from > 0:
            return Recompute(number[held_from] if held_from < len(number) else number[-1] + 1)
        case Offload(_, Moments(send, sent, fetch, fetched)) if max(send, sent or 0, fetch, fetched) >= len(number):
            return decision  # Problem.states says what is wrong with it
        case Offload(tier, Moments(send, sent, fetch, fetched)):
            send, fetch, fetched = min(number[send], num_forward), number[fetch], number[fetched]
            return Offload(
                tier, Moments(send, None if sent is None else min(number[sent], num_forward), fetch, fetched)
            )
    return decision


def refuse_lossy(step: Step, decisions: Decisions, *, who: str) -> None:
    """Raise if a decision would change the gradients: only a policy that says so of itself may do that."""
    for storage, decision in sorted(decisions.items()):
        if isinstance(decision, (Encode, EncodeThenOffload)) and codec(decision.codec).is_lossy:
            raise BadOption(
                f"{who} encodes storage {storage} ({step.storage_bytes[storage]:,} bytes, {_maker(step, storage)}) as "
                f"'{decision.codec}', which is lossy: gradients would differ from eager's. Lossless codecs: "
                f"{', '.join(LOSSLESS_NAMES)}"
            )


def why_not_encode(step: Step, storage: int, name: str) -> str:
    """What stands in the way of encoding the storage, or nothing."""
    chosen, candidate = codec(name), _candidate(step, storage)
    if isinstance(candidate, str):
        return candidate
    return chosen.why_not(candidate.value, candidate.readings)


def _candidate(step: Step, storage: int) -> _Candidate | str:
    """What there is to encode, or the reason that there is nothing."""
    known = step.storage.get(storage)
    if known is None or known.maker is None or known.maker >= step.num_forward or storage in step.kept:
        return "it is not made by the forward half, or it is handed to the caller"
    if known.first_backward is None:
        return "backward does not read it"
    if any(writer >= step.num_forward for writer in known.writers):
        return "backward writes to it"
    values: list[Value] = []
    readings: list[Reading] = []
    for member in known.values:
        for index in step.readers.get(member, ()):
            if index >= step.num_forward:
                values.append(step.values[member])
                readings += _readings(step, index, member)
    layouts = {_layout(value) for value in values}
    if len(layouts) != 1 or values[0].offset != 0 or values[0].bytes != known.bytes:
        return "backward reads it through views"
    return _Candidate(values[0], tuple(readings))


def _readings(step: Step, index: int, value: int) -> Iterator[Reading]:
    """How one op uses one value: a reading for each operand that it is."""
    op = step.ops[index]
    for operand, read, need in operand_needs(op, step.values):
        if read == value:
            arguments = visible_arguments(op, step.values)
            yield Reading(
                need,
                gate_of(op.target, operand, arguments) if need is Need.SIGN else None,
                pool_of(op.target, arguments) if need is Need.WINDOW else None,
                bounds_of(op.target, operand, arguments),
            )


def _layout(value: Value) -> tuple[object, ...]:
    return (value.shape, value.stride, value.offset, value.dtype, value.device)


def _maker(step: Step, storage: int) -> str:
    op = step.ops[step.storage[storage].maker or 0]
    return f"made by {op.target} in module '{op.path or '(root)'}'"


def _insert(draft: Draft, step: Step, storage: int, candidate: _Candidate, name: str) -> Value:
    """Put the two ops in, and let backward read what comes out of the second."""
    known, value = step.storage[storage], candidate.value
    chosen = codec(name)
    settings = chosen.settings(candidate.readings)
    assert known.last_forward is not None and known.first_backward is not None and known.maker is not None
    size = chosen.code_bytes(value, settings)
    flat = replace(value, shape=(size,), stride=(1,), offset=0, dtype=torch.uint8)
    code = draft.new_value(flat, f"{value.name}_code")
    fresh = draft.new_value(value, f"{value.name}_decoded")
    newest = [v for v in known.values if _layout(step.values[v]) == _layout(value)]
    made_forward = [v for v in newest if step.maker_of.get(v, -1) <= known.last_forward]
    path, source = step.ops[known.maker].path, step.ops[known.maker].source
    layout = Ghost(value.shape, value.stride, value.dtype, value.device)

    def op(target: str, args: tuple[object, ...], output: Value, half: Half) -> Op:
        return Op(target, args, (), (output.id,), False, half, path, source)

    encoding = op("memfit.encode", (Ref(made_forward[-1]), settings, chosen.name), code, Half.FORWARD)
    draft.insert_before(known.last_forward + 1, encoding)
    decoding = op("memfit.decode", (Ref(code.id), layout, settings, chosen.name), fresh, Half.BACKWARD)
    draft.insert_before(known.first_backward, decoding)
    members = set(known.values)
    for index in range(known.first_backward, len(step.ops)):
        reader = draft.ops[index]
        if reader is not None and members & set(reader.reads()):

            def swap(ref: Ref) -> Ref:
                return Ref(fresh.id) if ref.value in members else ref

            draft.ops[index] = replace(
                reader, args=map_refs(reader.args, swap), kwargs=tuple((k, map_refs(v, swap)) for k, v in reader.kwargs)
            )
    return code
