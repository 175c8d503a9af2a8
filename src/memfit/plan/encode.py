"""Write Encode decisions into the Step: an op that encodes after the last forward use, others that decode for backward.

Afterwards the code is a storage like any other, which can be kept, offloaded or recomputed, and the encoded storage is
one that backward does not read.

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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from memfit.capture.rewrites.draft import Draft
from memfit.capture.step import Ghost, Half, Op, Ref, Step, Value, map_refs
from memfit.codecs.registry import LOSSLESS_NAMES, codec
from memfit.errors import BadOption
from memfit.plan.decisions import Decision, Decisions, Encode, EncodeThenOffload, Moments, Offload, Recompute
from memfit.plan.fused import Coded, fused
from memfit.plan.readings import Candidate, Use, candidate_of, layout

_FAR_OPS = 6
"""Uses with more ops than that between them are far apart: a residual block's two ends, not one layer's gradients."""

_MASK = "mask"


@dataclass(frozen=True)
class Encoded:
    """The step with codes in it, and the decisions that are left for it."""

    step: Step
    decisions: dict[int, Decision]
    code_of: dict[int, int]


def encode_step(step: Step, decisions: Decisions) -> Encoded:
    """Write every Encode and EncodeThenOffload into the step; a step without any comes back as it is."""
    chosen = {s: d for s, d in decisions.items() if isinstance(d, (Encode, EncodeThenOffload))}
    left = {s: d for s, d in decisions.items() if s not in chosen}
    if not chosen:
        return Encoded(step, left, {})
    draft = Draft(step)
    codes: dict[int, int] = {}
    for storage, decision in sorted(chosen.items()):
        candidate = candidate_of(step, storage)
        why = why_not_encode(step, storage, decision.codec)
        if why or isinstance(candidate, str):
            known = step.storage.get(storage)
            size = "" if known is None else f" ({known.bytes:,} bytes, {_maker(step, storage)})"
            raise BadOption(f"storage {storage}{size} cannot be encoded as '{decision.codec}': {why}")
        code = _Insertion(draft, step, storage, candidate).write(decision.codec)
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

    def write(self, name: str) -> Value:
        """Put the ops in, and let backward read what they make; the code by the codec of that name."""
        gated = () if name == _MASK else self.candidate.gated
        uses = self.candidate.uses
        code = self._write([use for use in uses if use[0] not in gated], name, "code")
        if gated:
            self._write([use for use in uses if use[0] in gated], _MASK, "gate")
        return code

    def _write(self, uses: list[Use], name: str, what: str) -> Value:
        """One code, and who reads it."""
        value, chosen = self.candidate.value, codec(name)
        settings = chosen.settings([reading for _, readings in uses for reading in readings])
        size = chosen.code_bytes(value, settings)
        flat = replace(value, shape=(size,), stride=(1,), offset=0, dtype=torch.uint8)
        code = self.draft.new_value(flat, f"{value.name}_{what}")
        assert self.known.last_forward is not None
        encoding = self._op("memfit.encode", (Ref(value.id), settings, chosen.name), code, Half.FORWARD)
        self.draft.insert_before(self.known.last_forward + 1, encoding)
        coded = Coded(value, frozenset(self.known.values), code.id, chosen.name, settings)
        for near in _near([index for index, _ in uses]):
            self._decode_for(near, coded)
        return code

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
        ghost = Ghost(value.shape, value.stride, value.dtype, value.device)
        decoding = self._op("memfit.decode", (Ref(coded.code), ghost, coded.settings, coded.codec), fresh)
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
    yield group
