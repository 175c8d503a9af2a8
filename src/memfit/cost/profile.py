"""Measure what a step's ops cost on this machine: each distinct op is run alone, its time here, its workspace apart.

    measure(step)                                  a Costs named "here"; what was measured before is not run again
    measure(step, ways=True)                       and what convolutions cost in chunks (cost/ways.py)
    underestimated(signature, workspace_bytes)     a real run held more: the next measure() knows
    overpriced(costs)                              a real run was far faster: the next measure() takes all times anew

Times are taken in this process under its own allocator (see stopwatch.py), workspaces in one that has malloc pinned
(see [Note: pinned malloc] in resident.py). Ops are run one after the other, the most expensive first, and no more
memory is held than one of them needs, and the size of the CPU's cache. After `cap_s` the rest is estimated.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from memfit.capture.rewrites.proof import PROOFS, Proofs
from memfit.capture.step import Op, Step
from memfit.codecs import kernels
from memfit.codecs.registry import ALL_NAMES as CODECS
from memfit.cost.costs import HERE, CodecRate, Costs, Link, OpCost, picoseconds, priced_calls
from memfit.cost.densities import assumed_densities
from memfit.cost.links import DiskSpeed, measure_disk
from memfit.cost.operands import Call, CannotRunAlone
from memfit.cost.price_cache import PriceCache
from memfit.cost.signature import signature
from memfit.cost.stopwatch import MALLOC_KEEPS_BYTES, Stopwatch
from memfit.cost.ways import Ways, measured_alone
from memfit.cost.workspaces import Workspaces
from memfit.tiers.spill_file import spill_directory

log = logging.getLogger("memfit")

_SAVE_EVERY_S = 10.0
_SHARE_OF_OPS = 0.6  # of the time that is given, before ways of ops have their turn


@dataclass(frozen=True, slots=True)
class _Distinct:
    """One signature of the step: the call (None if it cannot be made), how often it occurs, what it hands over.

    Of a kind that makes gradients here and transients there, each op bears its share: `handovers` is then a fraction,
    and so are the bytes: those of first parts, which malloc would recycle in a loop, and those of parts to be added.
    """

    signature: str
    call: Call | None
    num_ops: int
    num_bytes: int
    handovers: float
    fresh_bytes: float
    added_bytes: float

    @property
    def work(self) -> int:
        """A guess at its share of the step, to put the most expensive first."""
        return self.num_ops * self.num_bytes


def measure(
    step: Step,
    *,
    cap_s: float = 60.0,
    max_op_bytes: int | None = None,
    ways: bool = False,
    also: Sequence[Step] = (),
    progress: Callable[[str], None] = lambda text: None,
    cache: PriceCache | None = None,
    proofs: Proofs = PROOFS,
) -> Costs:
    """What each op of the step costs on this machine's CPU, at the number of threads torch has now.

    Args:
        step: the step, with its rewrites.
        cap_s: after that many seconds, ops not yet measured are estimated from those that were; Costs.notes says so.
        max_op_bytes: an op with more operands and results than that is not run but estimated; None: all are run.
        ways: also prove and measure other ways to compute ops, for policies that pick among them (Costs.algorithms).
        also: other forms of the step (capture/rewrites/tight.py) whose ops are to be in the list too.
        progress: told now and then how far it is.
        cache: where prices are kept; None: this machine's file in memfit's cache folder.
        proofs: where it is kept which ways give the same bits.
    """
    cache = PriceCache.here() if cache is None else cache
    watch = Stopwatch()
    distinct = sorted(_distinct(step, *also), key=lambda d: d.work, reverse=True)
    measured: dict[str, OpCost] = {}
    begun = time.perf_counter()
    workspaces = Workspaces()
    found = Ways(step, cache, watch, proofs)

    def measure_ops(share: float) -> tuple[str, ...]:
        end = begun + share * cap_s
        return _measure_ops(distinct, measured, end, max_op_bytes, progress, cache, watch, workspaces)

    try:
        view_ps = picoseconds(cache.figure("view_s", watch.view_s))
        for entry in distinct:
            if entry.call is not None and entry.call.is_view:
                measured[entry.signature] = OpCost(view_ps)
        if ways:
            # Ways of the ops that matter most come before ops that hardly do.
            measure_ops(_SHARE_OF_OPS)
            found.measure(measured, begun + cap_s, workspaces, max_op_bytes=max_op_bytes, progress=progress)
        workspace_note = measure_ops(1.0)
        links, link_notes = _links(cache)
        copy_bytes_per_s = cache.figure("copy_bytes_per_s", watch.copy_bytes_per_s)
        codecs = {name: _codec_rate(name, cache, watch) for name in CODECS}
        prices = _estimate_rest(distinct, measured, cache, copy_bytes_per_s)
        by_signature = _with_handovers(distinct, prices, cache, watch)
        found.price(by_signature, call_ps=view_ps)
    finally:
        workspaces.close()
        cache.save()
    num_estimated = sum(cost.is_estimated for cost in prices.values())
    notes = [f"{num_estimated} of {len(prices)} kinds of ops are estimated, not measured"] if num_estimated else []
    return Costs(
        device=HERE,
        by_signature=by_signature | found.by_signature,
        links=links,
        codecs=codecs,
        default_codec=CodecRate(copy_bytes_per_s, copy_bytes_per_s),
        memory_bytes=_memory_bytes(),
        source="each kind of op measured alone on this machine's CPU",
        notes=(*notes, *workspace_note, *found.notes, *link_notes),
        algorithms=found.algorithms,
        densities=assumed_densities(step),
    )


def underestimated(op_signature: str, workspace_bytes: int, *, cache: PriceCache | None = None) -> None:
    """Remember that an op of that signature was seen to hold this much beyond its operands and results."""
    cache = PriceCache.here() if cache is None else cache
    cache.correct(op_signature, workspace_bytes)
    cache.save()


def overpriced(costs: Costs, *, cache: PriceCache | None = None) -> None:
    """Forget the times in these costs: whatever slows a step down, nothing makes it faster than its ops are."""
    cache = PriceCache.here() if cache is None else cache
    cache.forget_times(costs.by_signature)


def _distinct(*steps: Step) -> list[_Distinct]:
    """The signatures of a step and of its other forms, each as in the first that has it."""
    found: dict[str, _Distinct] = {}
    for step in steps:
        found = {entry.signature: entry for entry in _distinct_in(step)} | found
    return list(found.values())


def _distinct_in(step: Step) -> list[_Distinct]:
    """The step's signatures, each with the first of its ops for an example."""
    ops: dict[str, list[Op]] = defaultdict(list)
    for op in priced_calls(step):
        ops[signature(step, op)].append(op)
    found = []
    for name, same in ops.items():
        try:
            call = Call.of(step, same[0])
        except CannotRunAlone as error:
            log.info("cannot measure %s: %s", name, error)
            call = None
        touched = {step.values[value].storage for value in (*same[0].reads(), *same[0].made)}
        num_bytes = call.bytes if call is not None else sum(step.storage_bytes[storage] for storage in touched)
        found.append(_Distinct(name, call, len(same), num_bytes, *_handed_over(step, same)))
    return found


def _handed_over(step: Step, ops: list[Op]) -> tuple[float, float, float]:
    """On average over these ops: handovers, fresh bytes and added bytes; see [Note: fresh memory] in stopwatch.py."""
    first = {step.values[gradient.value].storage for gradient in step.first_parts}
    later = {step.values[gradient.value].storage for gradient in step.gradients} - first
    handovers = fresh_bytes = added_bytes = 0
    for op in ops:
        new = {step.values[v].storage for v in op.made} - {step.values[v].storage for v in op.reads()}
        handovers += bool(new & (first | later))
        fresh_bytes += sum(step.storage_bytes[s] for s in new & first if step.storage_bytes[s] <= MALLOC_KEEPS_BYTES)
        added_bytes += sum(step.storage_bytes[s] for s in new & later)
    return handovers / len(ops), fresh_bytes / len(ops), added_bytes / len(ops)


def _measure_ops(
    distinct: list[_Distinct],
    measured: dict[str, OpCost],
    end: float,
    max_op_bytes: int | None,
    progress: Callable[[str], None],
    cache: PriceCache,
    watch: Stopwatch,
    workspaces: Workspaces,
) -> tuple[str, ...]:
    """Fill in what the cache knows, run the rest until the time is up; notes on what could not be measured, and why."""
    for entry in distinct:
        known = cache.op(entry.signature)
        if known is not None:
            measured[entry.signature] = known
    waiting = [d for d in distinct if d.signature not in measured and d.call is not None]
    notes: tuple[str, ...] = ()
    if max_op_bytes is not None and any(d.num_bytes > max_op_bytes for d in waiting):
        kinds = len(waiting)
        waiting = [d for d in waiting if d.num_bytes <= max_op_bytes]
        notes = (f"{kinds - len(waiting)} kinds of ops need more than {max_op_bytes / 2**20:,.0f} MiB each: not run",)
    saved = time.perf_counter()
    for index, entry in enumerate(waiting):
        if time.perf_counter() >= end:
            break
        progress(f"measuring ops: {index + 1} of {len(waiting)}")
        assert entry.call is not None
        cost = measured_alone(entry.call, entry.signature, workspaces, watch)
        if cost is None:
            continue
        if not workspaces.notes:  # a workspace that is only taken to be 0 must not be believed later
            cache.add(entry.signature, cost)
        measured[entry.signature] = replace(
            cost, workspace_bytes=cache.corrected(entry.signature, cost.workspace_bytes)
        )
        if time.perf_counter() > saved + _SAVE_EVERY_S:  # an impatient user's Ctrl-C may also hit a save
            cache.save()
            saved = time.perf_counter()
    return (*notes, *workspaces.notes)


def _estimate_rest(
    distinct: list[_Distinct], measured: Mapping[str, OpCost], cache: PriceCache, copy_bytes_per_s: float
) -> dict[str, OpCost]:
    """Prices of all: what was not measured costs what others of its target cost per byte, or else a copy of its bytes.

    Its workspace is that of the worst of them, per byte: too much memory assumed is slow, too little is a failure.
    """
    alike: dict[str, list[tuple[int, OpCost]]] = defaultdict(list)
    for entry in distinct:
        if entry.signature in measured and entry.num_bytes:
            alike[_target(entry.signature)].append((entry.num_bytes, measured[entry.signature]))
    prices = dict(measured)
    for entry in distinct:
        if entry.signature in prices:
            continue
        target = _target(entry.signature)
        # A backward op moves about as many more bytes than its forward op as it takes more time.
        known = alike[target] or alike[target.replace("_backward.", ".")]
        if known:
            time_ps = sum(cost.time_ps for _, cost in known) * entry.num_bytes // sum(size for size, _ in known)
        else:
            time_ps = picoseconds(entry.num_bytes / copy_bytes_per_s)
        worst = max((cost.workspace_bytes / size for size, cost in known), default=0.0)
        workspace_bytes = cache.corrected(entry.signature, round(worst * entry.num_bytes))
        prices[entry.signature] = OpCost(max(time_ps, 1), workspace_bytes, is_estimated=True)
    return prices


def _with_handovers(
    distinct: list[_Distinct], prices: Mapping[str, OpCost], cache: PriceCache, watch: Stopwatch
) -> dict[str, OpCost]:
    """Add what gradients cost beyond the op that makes them. It depends on the step, so it is in no cached price."""
    handover_s = cache.figure("handover_s", watch.handover_s)
    fresh_s = cache.figure("fresh_s_per_byte", watch.fresh_s_per_byte)
    # Autograd adds a later part into a new block: two streams in, one out (a copy: one and one), and every page fresh.
    add_s = 1.5 / cache.figure("copy_bytes_per_s", watch.copy_bytes_per_s) + fresh_s
    found = {}
    for d in distinct:
        extra_s = d.handovers * handover_s + d.fresh_bytes * fresh_s + d.added_bytes * add_s
        cost = prices[d.signature]
        found[d.signature] = replace(cost, time_ps=cost.time_ps + picoseconds(extra_s))
    return found


def _links(cache: PriceCache) -> tuple[dict[str, Link], tuple[str, ...]]:
    """The disk that tensors are spilled to, if it works."""
    folder = str(spill_directory())
    measured: list[DiskSpeed] = []

    def figure(name: str) -> float:
        def now() -> float:
            if not measured:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                measured.append(measure_disk(folder))
            return float(getattr(measured[0], name))

        return cache.figure(f"disk {folder} {name}", now)

    try:
        speed = DiskSpeed(**{known.name: figure(known.name) for known in fields(DiskSpeed)})
    except OSError as error:
        return {}, (f"no disk tier: {folder} cannot be measured ({error})",)
    return {"disk": speed.link()}, ()


def _codec_form() -> str:
    """In what codecs run, which decides how fast they are."""
    return "C" if kernels.can_run(torch.empty(0)) else "torch"


def _codec_rate(name: str, cache: PriceCache, watch: Stopwatch) -> CodecRate:
    """How fast a codec is on this machine, measured once."""
    encode = cache.figure(f"codec {name} encode_bytes_per_s {_codec_form()}", lambda: watch.codec_bytes_per_s(name)[0])
    decode = cache.figure(f"codec {name} decode_bytes_per_s {_codec_form()}", lambda: watch.codec_bytes_per_s(name)[1])
    return CodecRate(encode, decode, cache.figure(f"codec call_s {_codec_form()}", watch.codec_call_s))


def _target(op_signature: str) -> str:
    return op_signature.partition("(")[0]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
