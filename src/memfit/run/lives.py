"""What is read last where: so generated code knows what to carry from function to function, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.capture.rerun_form import rerun_form
from memfit.capture.step import Step
from memfit.plan.program import FetchStart, FetchWait, Free, Run, SendWait
from memfit.run.slices import Numbered, Slice


@dataclass
class Lives:
    """Which function reads each thing last: 0 is the forward half, k + 1 the k-th slice.

    In its first life every value of a storage is carried by itself; in a later one the base stands for all.
    """

    last_reader: dict[int, int] = field(default_factory=dict)  # by value
    last_reader_of_base: dict[tuple[int, int], int] = field(default_factory=dict)  # by storage and life

    @classmethod
    def of(cls, step: Step, bodies: list[tuple[Numbered, ...]], slices: tuple[Slice, ...]) -> Lives:
        found = cls()
        life: dict[int, int] = {}
        live: set[int] = set()

        def read(value: int, function: int) -> None:
            storage = step.values[value].storage
            if life.get(storage, 0) == 0:
                found.last_reader[value] = function
            else:
                found.last_reader_of_base[storage, life[storage]] = function

        def come(storage: int) -> None:
            live.add(storage)
            life[storage] = life.get(storage, -1) + 1

        for function, body in enumerate(bodies):
            for _, instruction in body:
                match instruction:
                    case Run(index, again):
                        op = rerun_form(step.ops[index]) if again else step.ops[index]
                        for value in op.reads():
                            read(value, function)
                        for storage in dict.fromkeys(step.values[v].storage for v in op.made):
                            if storage not in live and step.storage[storage].maker == index:
                                come(storage)
                    case Free(storage) | SendWait(storage):
                        live.discard(storage)
                    case FetchStart(storage):
                        come(storage)
                    case FetchWait(storage):
                        found.last_reader_of_base[storage, life[storage]] = function
                    case _:
                        pass
            if function:
                for gradient in slices[function - 1].gives:
                    read(step.gradients[gradient].value, function)
        return found
