"""Second opinions on offloading chains: every schedule there is, the fluid relaxation as a linear program, a checker.

Nothing here uses the code under test but the chain's own numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from memfit.plan.offloading.chain import Chain, Schedule, Stage

PS_PER_S = 10**12


def random_chain(
    rng: random.Random, num_stages: int, *, largest: int = 5, shortest_ps: int = 0, longest_ps: int = 5
) -> Chain:
    """Any chain whose limit can be kept and is often tight, with transfers of a few picoseconds."""
    stages = tuple(
        Stage(
            forward_ps=rng.randint(shortest_ps, longest_ps),
            backward_ps=rng.randint(shortest_ps, longest_ps),
            saved_bytes=rng.randint(0, largest),
            forward_transient_bytes=rng.choice([0, rng.randint(0, largest)]),
            backward_transient_bytes=rng.choice([0, rng.randint(0, largest)]),
            is_convolution=rng.random() < 0.6,
        )
        for _ in range(num_stages)
    )
    floor = max(s.saved_bytes + max(s.forward_transient_bytes, s.backward_transient_bytes) for s in stages)
    speeds = [PS_PER_S, PS_PER_S // 2, 2 * PS_PER_S, 3 * PS_PER_S // 2]
    return Chain(
        stages,
        limit_bytes=rng.randint(floor, floor + sum(s.saved_bytes for s in stages) // 3),
        send_bytes_per_s=rng.choice(speeds),
        fetch_bytes_per_s=rng.choice([None, *speeds]),
        latency_ps=rng.choice([0, 0, 1]),
    )


# Every schedule. A half, told forward: its stages' (duration, saved bytes, transient bytes, transfer time).

Runs = list[tuple[int, int, int, int]]


def halves(chain: Chain) -> tuple[Runs, Runs]:
    def transfer_ps(size: int, bytes_per_s: int) -> int:
        whole, rest = divmod(size * PS_PER_S, bytes_per_s)
        return whole + (rest > 0) + chain.latency_ps

    sends, fetches = chain.send_bytes_per_s, chain.fetch_bytes_per_s or chain.send_bytes_per_s
    return (
        [
            (s.forward_ps, s.saved_bytes, s.forward_transient_bytes, transfer_ps(s.saved_bytes, sends))
            for s in chain.stages
        ],
        [
            (s.backward_ps, s.saved_bytes, s.backward_transient_bytes, transfer_ps(s.saved_bytes, fetches))
            for s in chain.stages
        ],
    )


def least_half_ps(runs: Runs, away: frozenset[int], limit_bytes: int, give_up_ps: int) -> int | None:
    """The least time of a half, by trying at every picosecond every thing that can be begun, and beginning nothing.

    A state is the next stage, how long the current one still runs, what is on the link and for how long, and what is
    still to send. None if it cannot be done in the time.
    """
    # What takes no time is begun and over within one moment, so states are closed over such moves first.
    states = {(0, 0, -1, 0, away)}
    for now_ps in range(give_up_ps + 1):
        reached = set(states)
        frontier = list(states)
        while frontier:
            state = frontier.pop()
            for after in _begun(runs, away, limit_bytes, state):
                if after not in reached:
                    reached.add(after)
                    frontier.append(after)
        if any(
            stage == len(runs) and not busy and sending < 0 and not left for stage, busy, sending, _, left in reached
        ):
            return now_ps
        states = {
            (stage, max(0, busy - 1), sending if rest > 1 else -1, max(0, rest - 1), left)
            for stage, busy, sending, rest, left in reached
        }
    return None


_State = tuple[int, int, int, int, frozenset[int]]


def _begun(runs: Runs, away: frozenset[int], limit_bytes: int, state: _State) -> Iterator[_State]:
    stage, busy, sending, rest, left = state
    if stage < len(runs) and not busy:
        here = sum(runs[j][1] for j in range(stage) if j not in away or j in left or j == sending)
        duration_ps, size, transient, _ = runs[stage]
        if here + size + transient <= limit_bytes:
            yield stage + 1, duration_ps, sending, rest, left
    if sending < 0:
        for item in left:
            if item < stage - (busy > 0):
                transfer_ps = runs[item][3]
                yield (
                    (stage, busy, item, transfer_ps, left - {item})
                    if transfer_ps
                    else (stage, busy, -1, 0, left - {item})
                )


def least_idle_ps(chain: Chain, known_ps: int) -> int:
    """The least that compute waits, over all choices and all schedules of each; known_ps is enough for one."""
    stages = range(len(chain.stages))
    forward, backward = halves(chain)
    forward_ps, backward_ps = (sum(run[0] for run in runs) for runs in (forward, backward))
    best = known_ps
    for size in range(len(stages) + 1):
        for away in map(frozenset, combinations(stages, size)):
            first = least_half_ps(forward, away, chain.limit_bytes, forward_ps + best)
            if first is None:
                continue
            idle_ps = first - forward_ps
            second = least_half_ps(backward, away, chain.limit_bytes, backward_ps + best - idle_ps)
            if second is not None:
                best = min(best, idle_ps + second - backward_ps)
    return best


# The fluid relaxation as a linear program, and an exact simplex for it.


def least_fluid_ps(chain: Chain, away: frozenset[int] | None = None) -> Fraction | None:
    """The optimum if bytes leave one by one: of fractions of all stages, or of exactly these stages, whole.

    Variables: the bytes sent of each stage; and for each half the bytes that leave while each stage runs, and the bytes
    that leave while compute waits in front of each stage and at the end.
    """
    count = len(chain.stages)
    width = count + 2 * (2 * count + 1)
    rows: list[tuple[list[Fraction], Fraction]] = []
    costs = [Fraction(0)] * width

    def at_most(bound: Fraction | int, *terms: tuple[int, Sequence[int]]) -> None:
        row = [Fraction(0)] * width
        for factor, variables in terms:
            for variable in variables:
                row[variable] += factor
        rows.append((row, Fraction(bound)))

    for i, stage in enumerate(chain.stages):
        at_most(stage.saved_bytes if away is None or i in away else 0, (1, [i]))
        if away is not None and i in away:
            at_most(-stage.saved_bytes, (-1, [i]))
    speeds = (chain.send_bytes_per_s, chain.fetch_bytes_per_s or chain.send_bytes_per_s)
    for half, (runs, bytes_per_s) in enumerate(zip(halves(chain), speeds, strict=True)):
        speed = Fraction(bytes_per_s, PS_PER_S)
        running = [count + half * (2 * count + 1) + i for i in range(count)]
        waiting = [running[-1] + 1 + i for i in range(count + 1)]
        for variable in waiting:
            costs[variable] = 1 / speed
        made_bytes = 0
        for i, (duration_ps, saved_bytes, transient_bytes, _) in enumerate(runs):
            made_bytes += saved_bytes
            left = running[:i] + waiting[: i + 1]
            at_most(0, (1, left + running[i : i + 1]), (-1, range(i)))  # only what stages before this one made
            at_most(speed * duration_ps, (1, running[i : i + 1]))
            at_most(chain.limit_bytes - made_bytes - transient_bytes, (-1, left))
        at_most(0, (1, running + waiting), (-1, range(count)))
        at_most(0, (-1, running + waiting), (1, range(count)))
    return minimum(costs, rows)


def minimum(costs: list[Fraction], rows: list[tuple[list[Fraction], Fraction]]) -> Fraction | None:
    """The least costs * x with x >= 0 and row * x <= bound for every row; None if there is no x.

    The two-phase simplex with Bland's rule on fractions, for programs whose costs are not negative.
    """
    count = len(costs)
    # One variable that eases every row makes a first corner: drive it to zero, then forget it.
    table = [[*row, Fraction(-1), bound] for row, bound in rows]
    basic = [count + 1 + i for i in range(len(rows))]
    # Each table row says: basic = last - sum of the others; `names` are the variables of the columns.
    names = list(range(count + 1))
    ease = [Fraction(0)] * count + [Fraction(1), Fraction(0)]
    goal = [*costs, Fraction(0), Fraction(0)]

    def pivot(at: int, column: int) -> None:
        row = table[at]
        factor = 1 / row[column]
        table[at] = row = [value * factor for value in row]
        row[column] = factor
        for other in (*(r for i, r in enumerate(table) if i != at), ease, goal):
            times = other[column]
            if times:
                other[:] = [value - times * mine for value, mine in zip(other, row, strict=True)]
                other[column] = -times * factor
        basic[at], names[column] = names[column], basic[at]

    def descend(objective: list[Fraction]) -> None:
        while True:
            falling = [(names[c], c) for c in range(len(names)) if objective[c] < 0]
            if not falling:
                return
            column = min(falling)[1]
            ratios = [(row[-1] / row[column], basic[i], i) for i, row in enumerate(table) if row[column] > 0]
            pivot(min(ratios)[2], column)

    worst = min(range(len(table)), key=lambda i: table[i][-1])
    if table[worst][-1] < 0:
        pivot(worst, count)
        descend(ease)
        if ease[-1] != 0:
            return None
    if count in basic:
        at = basic.index(count)
        pivot(at, next(c for c in range(len(names)) if table[at][c] != 0))
    column = names.index(count)
    for row in (*table, ease, goal):
        del row[column]
    del names[column]
    descend(goal)
    return -goal[-1]


# A checker of schedules.


def complaints(chain: Chain, schedule: Schedule) -> list[str]:
    """What a schedule does that the model forbids, or says wrongly; of stages that take at least a picosecond."""
    found = []
    forward = [(t, t + s.forward_ps) for t, s in zip(schedule.forward_starts_ps, chain.stages, strict=True)]
    backward = [(t, t + s.backward_ps) for t, s in zip(schedule.backward_starts_ps, chain.stages, strict=True)]
    order = forward + backward[::-1]
    if any(before[1] > after[0] for before, after in pairwise(order)):
        found.append("compute does two things at once")
    if order[-1][1] - chain.work_ps != schedule.idle_ps or order[0][0] < 0:
        found.append("idle time is not what it says")
    sends = {t.stage: t for t in schedule.sends}
    fetches = {t.stage: t for t in schedule.fetches}
    if not (sorted(sends) == sorted(fetches) == list(schedule.away)):
        found.append("not each stage that is away is sent and fetched once")
    for transfers, runs in zip((schedule.sends, schedule.fetches), halves(chain), strict=True):
        if any(before.end_ps > after.start_ps for before, after in pairwise(transfers)):
            found.append("the link does two things at once")
        if any(t.end_ps - t.start_ps != runs[t.stage][3] for t in transfers):
            found.append("a transfer has the wrong length")
    if any(t.start_ps < forward[t.stage][1] or t.end_ps > backward[-1][0] for t in schedule.sends):
        found.append("a send starts before its bytes are made, or ends after the first backward starts")
    if any(t.start_ps < forward[-1][1] or t.end_ps > backward[t.stage][0] for t in schedule.fetches):
        found.append("a fetch starts before forward is over, or ends after its backward starts")
    lives = [  # from, to, bytes
        (forward[i][0], backward[i][1], stage.saved_bytes) for i, stage in enumerate(chain.stages) if i not in sends
    ]
    lives += [(forward[i][0], t.end_ps, chain.stages[i].saved_bytes) for i, t in sends.items()]
    lives += [(t.start_ps, backward[i][1], chain.stages[i].saved_bytes) for i, t in fetches.items()]
    lives += [(*run, s.forward_transient_bytes) for run, s in zip(forward, chain.stages, strict=True)]
    lives += [(*run, s.backward_transient_bytes) for run, s in zip(backward, chain.stages, strict=True)]
    # Whatever lives begins at a whole picosecond: the peak is when something begins.
    peak = max(sum(size for since, until, size in lives if since <= begun < until) for begun, _, _ in lives)
    if peak > chain.limit_bytes:
        found.append(f"{peak} bytes at once, and the limit is {chain.limit_bytes}")
    if peak > schedule.peak_bytes:
        found.append(f"{peak} bytes at once, and it says {schedule.peak_bytes}")
    return found
