"""The host tier's waits, proved on a machine that does everything at the worst moment.

The same programs and the same moments on the right tier and on tiers with one mistake each: the right one must always
be right, and each mistake must show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from stream_machine import HostHeldStill, Moments, SimulatedDevice, StreamMachine
from stream_machine_mistakes import MISTAKES, HostWaits
from stream_machine_programs import run_program

from memfit.tiers.host import HostParcel, HostTier

NUM_SEEDS = 200
LATEST = Moments.all_kinds(0)[1]
EARLIEST = Moments.all_kinds(0)[0]


def moments(name: str) -> Moments:
    return next(kind for kind in Moments.all_kinds(0) if kind.name == name)


# --- the machine itself ----------------------------------------------------------------------------------------------


def write(machine: StreamMachine, tensor: torch.Tensor, number: int) -> None:
    raw = machine.raw(tensor)

    def do() -> None:
        raw[:] = number

    machine.compute(machine.devices[0], do)


def read(machine: StreamMachine, tensor: torch.Tensor) -> list[int]:
    """What a kernel queued now will find."""
    raw, found = machine.raw(tensor), []
    machine.compute(machine.devices[0], lambda: found.extend(np.unique(raw).tolist()))
    return found


def test_work_of_one_stream_is_done_in_order_and_not_before_its_moment() -> None:
    for kind in (EARLIEST, LATEST):
        machine = StreamMachine(kind)
        tensor = machine.devices[0].empty(32)
        write(machine, tensor, 1)
        first = read(machine, tensor)
        write(machine, tensor, 2)
        second = read(machine, tensor)
        assert (first, second) == (([1], [2]) if kind is EARLIEST else ([], []))
        machine.finish()
        assert (first, second) == ([1], [2])


def test_a_block_let_go_of_is_handed_out_at_once_on_its_own_stream_only_and_is_ruined_in_order() -> None:
    machine = StreamMachine(LATEST, num_compute_streams=2)
    device = machine.devices[0]
    tensor = device.empty(64)
    write(machine, tensor, 7)
    before = read(machine, tensor)
    address = tensor.data_ptr()
    del tensor
    device.current = device.compute_streams[1]
    assert device.empty(64).data_ptr() != address
    device.current = device.compute_streams[0]
    again = device.empty(64)
    assert again.data_ptr() == address
    after = read(machine, again)
    machine.finish()
    assert before == [7], "queued before the block was let go of"
    assert after != [7], "what a new block holds is nobody's"


def test_a_copy_that_no_event_orders_finds_what_the_machine_likes() -> None:
    """Without waits a copy may come before its source is written or after it is ruined."""
    found = set()
    for kind in Moments.all_kinds(1):
        machine = StreamMachine(kind)
        device = machine.devices[0]
        block = machine.pinned(64)
        tensor = device.empty(64)
        write(machine, tensor, 7)
        device.copy(block.memory, tensor, device.out_stream)
        del tensor
        machine.finish()
        found.add("right" if bool((block.memory == 7).all()) else "wrong")
    assert found == {"right", "wrong"}


def test_streams_that_wait_for_each_other_are_told_apart_from_streams_that_are_slow() -> None:
    machine = StreamMachine(LATEST)
    device = machine.devices[0]
    ahead = StreamMachine(LATEST).devices[0].current.record_event()
    device.current.wait_event(ahead)
    with pytest.raises(AssertionError, match="wait for each other: compute has 1"):
        machine.finish()


# --- the tier on it --------------------------------------------------------------------------------------------------


def test_the_tier_is_right_whenever_its_work_is_done() -> None:
    """Thousands of programs and moments; that none holds the host still is a part of it."""
    done: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        for kind in Moments.all_kinds(seed):
            outcome = run_program(HostTier, kind, seed)
            assert not outcome.wrong, (seed, kind.name, outcome.wrong)
            assert outcome.num_left_bytes == outcome.num_away_bytes == outcome.num_in_flight_bytes == 0, (seed, kind)
            done += outcome.done
    assert done["send"] > 15_000 and done["fetched"] > 5_000 and done["abandon"] > 5_000 and done["refused"] > 0


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_each_classic_mistake_shows_as_wrong_bytes(mistake: type[HostTier]) -> None:
    tried = ((seed, kind) for seed in range(NUM_SEEDS) for kind in Moments.all_kinds(seed))
    assert any(run_program(mistake, kind, seed).wrong for seed, kind in tried)


def test_a_tier_that_holds_the_host_still_is_found_out() -> None:
    machine = StreamMachine(LATEST)
    parcel = HostWaits(limit_bytes=1 << 20, accelerators=machine).send(machine.devices[0].empty(64))
    with pytest.raises(HostHeldStill):
        parcel.sent()
    machine.finish()
    parcel.sent()


def fetched_on_another_stream(machine: StreamMachine, parcel_type: type[HostParcel]) -> list[int]:
    """Fetched on one stream, handed over on another, let go of unread: what the next owner of the block finds."""
    device = machine.devices[0]
    first, second = device.compute_streams
    tier: Any = HostTier(limit_bytes=1 << 20, accelerators=machine)
    tensor = device.empty(64)
    write(machine, tensor, 1)
    parcel = tier.send(tensor)
    del tensor
    parcel.sent()
    parcel.fetch()
    second.wait_event(first.record_event())
    device.current = second
    parcel.__class__ = parcel_type
    parcel.fetched()
    device.current = first
    tensor = device.empty(64)
    write(machine, tensor, 2)
    machine.finish()
    found = read(machine, tensor)
    machine.finish()
    return found


class _ReaderAloneWaits(HostParcel):
    def fetched(self) -> torch.Tensor:
        assert self._arrived is not None and self._buffer is not None
        self._tier._before_reading(self._departure.device.current_stream(), self._arrived)
        buffer, self._buffer = self._buffer, None
        return buffer


def test_a_buffer_handed_over_on_another_stream_goes_back_behind_its_copy() -> None:
    kinds = Moments.all_kinds(0)
    assert all(fetched_on_another_stream(StreamMachine(k, num_compute_streams=2), HostParcel) == [2] for k in kinds)
    mistaken = [fetched_on_another_stream(StreamMachine(k, num_compute_streams=2), _ReaderAloneWaits) for k in kinds]
    assert any(found != [2] for found in mistaken)


def test_fetched_before_it_was_sent_a_storage_is_used_where_it_is_and_compute_does_not_wait() -> None:
    machine = StreamMachine(moments("out behind"))
    device: SimulatedDevice = machine.devices[0]
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    tensor = device.empty(64)
    write(machine, tensor, 5)
    parcel = tier.send(tensor)
    address = tensor.data_ptr()
    del tensor
    assert parcel.fetch().data_ptr() == address
    back = parcel.fetched()
    assert read(machine, back) == [5], "though not a byte has been sent"
    assert device.out_stream.queue
    write(machine, back, 6)  # in place, under the copy that nobody will read
    assert read(machine, back) == [6]
    del back
    machine.finish()
    assert machine.used_bytes == 0 and tier.pool.free_bytes == tier.pool.total_bytes
