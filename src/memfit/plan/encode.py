"""Write Encode decisions into the Step: an op that encodes after the last forward use, others that decode for backward.

Afterwards the code is a storage like any other, which can be kept, offloaded or recomputed, and the encoded storage is
one that backward does not read. Ways to compute an op that are calls of their own (`chunks:4`) are written in as well.

[Note: how often to decode]
Decoded, a tensor is as large as ever, so it should not live long. Uses that follow one another closely share one copy;
before a use that is far from the last one it is decoded anew. An op that can work on the code itself (fused.py) needs
no copy at all.

[Note: a gate beside values]
A convolution's input is read twice: by the gradient of the weights, whole, and then by ReLU's backward, which asks only
for its gate. In between the gradient of the input is made. So that neither the copy nor its code is held through that,
such a storage has two codes: one of values, and a mask for those who ask for the gate alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from memfit.capture.needs import Need
from memfit.capture.rewrites.chunks import in_chunks, num_chunks_of, why_not_in_chunks
from memfit.capture.rewrites.draft import Draft
from memfit.capture.step import Half, Op, Ref, Step, Value, map_refs
from memfit.codecs.registry import LOSSLESS_NAMES, codec
from memfit.errors import BadOption
from memfit.plan.decisions import Code, Decision, Decisions, Encode, EncodeThenOffload, Moments, Offload, Recompute
from memfit.plan.fused import Coded, fused, ghost_of
from memfit.plan.readings import Candidate, candidate_of, layout

_FAR_OPS = 6
"""Uses with more ops than that between them are far apart: a residual block's two ends, not one layer's gradients."""

_MASK = "mask"


@dataclass(frozen=True)
class Encoded:
    """The step with codes in it, and the decisions that are left for it.

    Attributes:
        code_of: for each storage that is encoded, that of its code.
        codes: and how it was encoded.
    """

    step: Step
    decisions: dict[int, Decision]
    code_of: dict[int, int]
    codes: dict[int, tuple[Code, ...]]


def encode_step(step: Step, decisions: Decisions, picked: Mapping[int, str] = MappingProxyType({})) -> Encoded:
    """Write every Encode and EncodeThenOffload into the step; a step without any comes back as it is.

    `picked` are ways to compute ops, by number. Those in chunks are written in too; others only have another price.
    """
    chosen = {s: d for s, d in decisions.items() if isinstance(d, (Encode, EncodeThenOffload))}
    left = {s: d for s, d in decisions.items() if s not in chosen}
    if not chosen:
        return Encoded(_with_chunks(step, step, picked), left, {}, {})
    draft = Draft(step)
    code_of: dict[int, int] = {}
    codes: dict[int, tuple[Code, ...]] = {}
    for storage, decision in sorted(chosen.items()):
        codec(decision.codec)  # raises if there is none of that name
        if decision.as_in and not _is_read(step, storage):
            continue  # this backward half has no use for what is there
        candidate = candidate_of(step, storage, decision.as_in[0].value if decision.as_in else None)
        if isinstance(candidate, str):
            raise BadOption(_refusal(step, storage, decision.codec, candidate))
        codes[storage] = decision.as_in or _codes(step, storage, candidate, decision.codec)
        written = _Insertion(draft, step, storage, candidate).write(codes[storage])
        code_of[storage] = written.storage
        if isinstance(decision, EncodeThenOffload):
            left[written.storage] = Offload(decision.tier, back_by=decision.back_by)
    encoded = draft.close()
    number = draft.renumbered(encoded)
    left = {s: _renumbered(d, number, encoded.num_forward) for s, d in left.items()}
    return Encoded(_with_chunks(encoded, step, picked), left, code_of, codes)


def _with_chunks(encoded: Step, step: Step, picked: Mapping[int, str]) -> Step:
    """The step with the ops that were picked to be in chunks so; an op is known by what it makes.

    Codes come first: who reads what of a storage is known of the plain ops.
    """
    for index, way in picked.items():
        if not 0 <= index < len(step.ops):
            raise BadOption(f"'{way}' is picked for op {index}: the step has ops 0 to {len(step.ops) - 1}")
    counts = {op: count for op, way in picked.items() if (count := num_chunks_of(way)) is not None}
    if not counts:
        return encoded
    number = {op.made[0]: index for index, op in enumerate(encoded.ops) if op.made}
    ops = list(encoded.ops)
    for index, count in sorted(counts.items()):
        plain = step.ops[index]
        why = why_not_in_chunks(step, plain, count)
        if why:
            raise BadOption(
                f"op {index}, {plain.target} in module '{plain.path or '(root)'}', cannot be computed in {count} "
                f"chunks: {why}. Costs.choices(step) says which ways there are"
            )
        place = number[plain.made[0]]
        ops[place] = in_chunks(ops[place], count)
    return replace(encoded, ops=tuple(ops))


def _is_read(step: Step, storage: int) -> bool:
    return storage in step.storage and step.storage[storage].first_backward is not None


def _codes(step: Step, storage: int, candidate: Candidate, name: str) -> tuple[Code, ...]:
    """By which codes the storage is to be stored; see [Note: a gate beside values]."""
    chosen = codec(name)
    why = chosen.why_not(candidate.value, candidate.readings)
    if why:
        raise BadOption(_refusal(step, storage, name, why))
    gated = () if name == _MASK else candidate.gated
    value = candidate.value.name
    found = [Code(value, chosen.name, chosen.settings(candidate.readings_of(without=gated)))]
    if gated:
        found.append(Code(value, _MASK, codec(_MASK).settings(candidate.readings_of(only=gated)), is_gate=True))
    return tuple(found)


def _refusal(step: Step, storage: int, name: str, why: str) -> str:
    known = step.storage.get(storage)
    size = "" if known is None else f" ({known.bytes:,} bytes, {_maker(step, storage)})"
    return f"storage {storage}{size} cannot be encoded as '{name}': {why}"


def _renumbered(decision: Decision, number: list[int], num_forward: int) -> Decision:
    """The decision with the numbers that ops have now."""
    match decision:
        case Recompute(held_from) if held_from > 0:
            return Recompute(number[held_from] if held_from < len(number) else number[-1] + 1)
        case Offload(tier, None, back_by) if 0 < back_by < len(number) and number[back_by] >= num_forward:
            # In front of what is decoded for that op, too: right behind the one before it.
            return Offload(tier, back_by=max(number[back_by - 1] + 1, num_forward))
        case Offload(_, Moments(send, sent, fetch, fetched)) if max(send, sent or 0, fetch, fetched) >= len(number):
            return decision  # Problem.states says what is wrong with it
        case Offload(tier, Moments(send, sent, fetch, fetched)):
            send, fetch, fetched = min(number[send], num_forward), number[fetch], number[fetched]
            return Offload(
                tier, Moments(send, None if sent is None else min(number[sent], num_forward), fetch, fetched)
            )
    return decision


def lossy_storages(decisions: Decisions) -> dict[int, str]:
    """The storages that are encoded with loss, each with its codec."""
    return {
        storage: decision.codec
        for storage, decision in sorted(decisions.items())
        if isinstance(decision, (Encode, EncodeThenOffload)) and codec(decision.codec).is_lossy
    }


def refuse_lossy(step: Step, decisions: Decisions, *, who: str) -> None:
    """Raise if a decision would change the gradients: only a policy that says so of itself may do that."""
    for storage, name in lossy_storages(decisions).items():
        raise BadOption(
            f"{who} encodes storage {storage} ({step.storage_bytes[storage]:,} bytes, {_maker(step, storage)}) as "
            f"'{name}', which is lossy: gradients would differ from eager's. Lossless codecs: "
            f"{', '.join(LOSSLESS_NAMES)}"
        )


def why_not_encode(step: Step, storage: int, name: str) -> str:
    """What stands in the way of encoding the storage, or nothing."""
    chosen, candidate = codec(name), candidate_of(step, storage)
    if isinstance(candidate, str):
        return candidate
    return chosen.why_not(candidate.value, candidate.readings)


def _maker(step: Step, storage: int) -> str:
    op = step.ops[step.storage[storage].maker or 0]
    return f"made by {op.target} in module '{op.path or '(root)'}'"


class _Insertion:
    """One storage's codes on their way into the step."""

    def __init__(self, draft: Draft, step: Step, storage: int, candidate: Candidate) -> None:
        self.draft = draft
        self.step = step
        self.known = step.storage[storage]
        self.candidate = candidate

    def write(self, codes: tuple[Code, ...]) -> Value:
        """Put the ops in, and let backward read what they make; the first of the codes."""
        first, *others = codes
        by_gate = {repr(code.settings): code for code in others}
        uses: dict[Code, list[int]] = {code: [] for code in codes}
        for index, readings in self.candidate.uses:
            asks_gate = readings and all(reading.need is Need.SIGN for reading in readings)
            gate = repr(codec(_MASK).settings(readings)) if asks_gate else ""
            uses[by_gate.get(gate, first)].append(index)
        written = [self._write(code, uses[code]) for code in codes]
        return written[0]

    def _write(self, code: Code, uses: list[int]) -> Value:
        """One code, and who reads it."""
        value, chosen = self.candidate.value, codec(code.codec)
        self._require_served(code, uses)
        size = chosen.code_bytes(value, code.settings)
        flat = replace(value, shape=(size,), stride=(1,), offset=0, dtype=torch.uint8)
        made = self.draft.new_value(flat, f"{value.name}_{'gate' if code.is_gate else 'code'}")
        assert self.known.last_forward is not None
        args = (Ref(value.id), ghost_of(value), code.settings, chosen.name)
        self.draft.insert_before(self.known.last_forward + 1, self._op("memfit.encode", args, made, Half.FORWARD))
        coded = Coded(value, frozenset(self.known.values), made.id, chosen.name, code.settings)
        for near in _near(uses):
            self._decode_for(near, coded)
        return made

    def _require_served(self, code: Code, uses: list[int]) -> None:
        """Raise if the code does not hold what these ops ask for: another backward half may ask for more."""
        readings = self.candidate.readings_of(only=tuple(uses))
        if not readings:
            return
        chosen = codec(code.codec)
        why = chosen.why_not(self.candidate.value, readings)
        is_other = code.codec in (_MASK, "window") and repr(chosen.settings(readings)) != repr(code.settings)
        if why or is_other:
            why = why or "it was encoded for other uses"
            raise BadOption(_refusal(self.step, self.known.id, code.codec, why))

    def _decode_for(self, uses: list[int], coded: Coded) -> None:
        """Let ops that follow one another read a decoded copy, or the code itself."""
        value = coded.value
        left: list[int] = []
        for index in uses:
            on_code = fused(self._reader(index), coded, self.draft.values)
            if on_code is None:
                left.append(index)
            else:
                self.draft.ops[index] = on_code
        if not left:
            return
        fresh = self.draft.new_value(value, f"{value.name}_decoded")
        decoding = self._op("memfit.decode", (Ref(coded.code), ghost_of(value), coded.settings, coded.codec), fresh)
        self.draft.insert_before(left[0], decoding)
        stands_for = dict.fromkeys(coded.members, fresh.id)
        for view in (v for v in self.candidate.views if any(v in self._reader(i).reads() for i in left)):
            seen = self.step.values[view]
            again = self.draft.new_view(fresh, seen, f"{seen.name}_decoded")
            layout_args = (Ref(fresh.id), seen.shape, seen.stride, seen.offset)
            self.draft.insert_before(left[0], self._op("memfit.view", layout_args, again))
            stands_for |= {v: again.id for v in coded.members if layout(self.step.values[v]) == layout(seen)}

        def swap(ref: Ref) -> Ref:
            return Ref(stands_for.get(ref.value, ref.value))

        for index in left:
            reader = self._reader(index)
            self.draft.ops[index] = replace(
                reader, args=map_refs(reader.args, swap), kwargs=tuple((k, map_refs(v, swap)) for k, v in reader.kwargs)
            )

    def _reader(self, index: int) -> Op:
        reader = self.draft.ops[index]
        assert reader is not None
        return reader

    def _op(self, target: str, args: tuple[object, ...], output: Value, half: Half = Half.BACKWARD) -> Op:
        assert self.known.maker is not None
        maker = self.step.ops[self.known.maker]
        return Op(target, args, (), (output.id,), False, half, maker.path, maker.source)


def _near(uses: list[int]) -> Iterator[list[int]]:
    """Uses in groups: within one, none is far from the one before."""
    group: list[int] = []
    for index in uses:
        if group and index - group[-1] > _FAR_OPS + 1:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
