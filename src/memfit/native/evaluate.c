/* The library's face: states of storages in, peak and time of the lowered step out. */

#include <stdlib.h>
#include <string.h>

#include "evaluator.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { GAP_BYTES = 64 }; /* between arrays: who goes beyond the end of one is found out */
#else
enum { GAP_BYTES = 0 };
#define ASAN_POISON_MEMORY_REGION(address, size)
#endif

/* One block of memory for everything. Without a block it only counts. */
typedef struct {
    char *block;
    size_t used;
} Arena;

static void *take(Arena *arena, int64_t count, size_t size)
{
    size_t offset = (arena->used + 15) & ~(size_t)15, end = offset + (size_t)count * size;
    arena->used = end + GAP_BYTES;
    if (!arena->block)
        return NULL;
    ASAN_POISON_MEMORY_REGION(arena->block + end, GAP_BYTES);
    return arena->block + offset;
}

#define TAKE(field, count) (e->field = take(arena, (count), sizeof *e->field))

static void lay_out(Evaluator *e, Arena *arena)
{
    const Problem *p = &e->problem;
    int64_t num_storages = p->num_storages, num_channels = p->num_channels, max_length = p->max_length;
    TAKE(made_bytes, p->num_ops);
    TAKE(rerun_made_bytes, p->num_forward);
    TAKE(recomputable, num_storages);
    TAKE(least_op_ps, p->num_ops);
    TAKE(least_rerun_ps, p->num_ops);
    TAKE(least_workspace_bytes, p->num_ops);
    TAKE(choice_of, p->num_ops);
    TAKE(op_ps, p->num_ops);
    TAKE(rerun_ps, p->num_ops);
    TAKE(workspace_bytes, p->num_ops);
    TAKE(room_bytes, p->num_choices);
    TAKE(chosen, p->num_choices);
    TAKE(choice_positions, max_length);
    TAKE(ops, max_length);
    TAKE(again, max_length);
    TAKE(remade_starts, max_length + 1);
    TAKE(remade, p->max_rerun_made);
    TAKE(position, p->num_ops);
    TAKE(missing, num_storages);
    TAKE(stack, num_storages);
    TAKE(burst, p->num_forward / 64 + 1);
    TAKE(passing, num_storages);
    TAKE(last_touch, num_storages);
    TAKE(needs, max_length);
    TAKE(given_at, num_storages);
    TAKE(gives_at, p->num_handings);
    TAKE(in_use, num_storages);
    TAKE(first_use, num_storages);
    TAKE(fetched_at, num_storages);
    TAKE(frees_starts, max_length + 1);
    TAKE(frees, num_storages + p->max_rerun_made); /* each lives once, and once more whenever it is remade */
    TAKE(sends_starts, p->num_forward + 1);
    TAKE(sends, num_storages);
    TAKE(fetched_starts, max_length + 1);
    TAKE(fetched, num_storages);
    TAKE(sooner_starts, max_length + 1);
    TAKE(sooner, num_storages);
    TAKE(frees_before_head, max_length + 1);
    TAKE(frees_before_next, num_storages);
    TAKE(free_ps, num_channels);
    TAKE(is_here, num_storages);
    TAKE(ended, num_storages);
    TAKE(starts_head, max_length + 1);
    TAKE(starts_next, num_storages);
    /* Runs; frees of lives, and of what a re-run makes to no end; sends and fetches and waits for them; gradients. */
    TAKE(instructions, max_length + num_storages + p->max_rerun_made + 4 * num_storages + p->num_handings + 1);
    TAKE(queue_head, num_channels);
    TAKE(queue_tail, num_channels);
    TAKE(queue_next, num_storages);
    TAKE(end_ps, num_storages);
    TAKE(started, num_storages);
    TAKE(released, num_storages);
    TAKE(present, num_storages);
}

static int64_t sum_of(const int64_t *bytes, Span storages)
{
    int64_t sum = 0;
    for (const int32_t *s = storages.begin; s < storages.end; s++)
        sum += bytes[*s];
    return sum;
}

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* What the problem says in other words, to be read in every evaluation. */
static void lay_down(Evaluator *e)
{
    const Problem *p = &e->problem;
    e->base_bytes = e->least_ps = e->least_forward_ps = 0;
    e->num_recomputable = 0;
    for (int32_t s = 0; s < p->num_storages; s++) {
        e->base_bytes += p->is_present[s] ? p->storage_bytes[s] : 0;
        e->given_at[s] = -1;
        if (p->is_recomputable[s])
            e->recomputable[e->num_recomputable++] = s;
    }
    e->tangent_bytes = sum_of(p->storage_bytes, (Span){p->tangents, p->tangents + p->num_tangents});
    for (int64_t op = 0; op < p->num_ops; op++) {
        e->made_bytes[op] = sum_of(p->storage_bytes, list(p->makes, op));
        if (op < p->num_forward)
            e->rerun_made_bytes[op] = sum_of(p->storage_bytes, list(p->rerun_makes, op));
        e->op_ps[op] = p->op_ps[op];
        e->rerun_ps[op] = e->least_rerun_ps[op] = p->rerun_ps[op];
        e->workspace_bytes[op] = e->least_workspace_bytes[op] = p->workspace_bytes[op];
        e->choice_of[op] = -1;
    }
    for (int32_t choice = 0; choice < p->num_choices; choice++) {
        int32_t op = p->choice_ops[choice], first = p->way_starts[choice], end = p->way_starts[choice + 1];
        e->choice_of[op] = choice;
        e->op_ps[op] = p->way_ps[first];
        e->least_workspace_bytes[op] = p->way_workspace_bytes[end - 1];
        e->least_rerun_ps[op] = p->way_rerun_ps[first];
        for (int32_t way = first + 1; way < end; way++)
            e->least_rerun_ps[op] = smaller(e->least_rerun_ps[op], p->way_rerun_ps[way]);
    }
    for (int64_t op = 0; op < p->num_ops; op++) {
        e->least_ps += e->op_ps[op];
        e->least_forward_ps += op < p->num_forward ? e->op_ps[op] : 0;
        e->least_op_ps[op] = e->op_ps[op];
    }
}

/* The first storage whose state is not from -num_ops up to the last tier, back by the last op; -1: there is none. */
static int64_t find_wrong_state(const Problem *p, const int32_t *states)
{
    const uint32_t num_negative = (uint32_t)p->num_ops;
    const uint32_t num_all = num_negative + AWAY + (uint32_t)(p->num_tiers * p->num_ops);
    const int64_t num_storages = p->num_storages;
    int32_t num_wrong = 0; /* there is no way out of the loop, so that it becomes vectors */
    for (int64_t s = 0; s < num_storages; s++)
        num_wrong += (uint32_t)states[s] + num_negative >= num_all;
    for (int64_t s = 0; num_wrong && s < num_storages; s++)
        if ((uint32_t)states[s] + num_negative >= num_all)
            return s;
    return -1;
}

/* EVALUATED, and `outcome` is filled in; NOT_BETTER or OUTGROWN, and it is not; or the number of the first storage
 * whose state does not exist. */
int64_t memfit_evaluate(Evaluator *e, Trial *trial)
{
    int64_t wrong = find_wrong_state(&e->problem, trial->states);
    if (wrong >= 0)
        return wrong;
    e->states = trial->states;
    e->limit_bytes = trial->limit_bytes;
    e->incumbent = trial->incumbent;
    if (trial->is_changed) {
        lay_down(e);
        trial->is_changed = false;
    }
    int64_t verdict = memfit_lower(e);
    if (verdict != EVALUATED)
        return verdict;
    Outcome *outcome = &trial->outcome;
    memfit_simulate(e, outcome);
    bool is_better =
        may_improve(e, violation(outcome->max_excess_bytes, outcome->sum_excess_bytes), outcome->step_ps);
    return is_better ? EVALUATED : NOT_BETTER;
}

/* The instructions of the last trial that was evaluated; there is room for outcome.num_instructions. */
void memfit_instructions(const Evaluator *e, Instruction *instructions)
{
    memcpy(instructions, e->instructions, (size_t)e->num_instructions * sizeof *instructions);
}

/* Which way it chose for each choice. */
void memfit_ways(const Evaluator *e, int32_t *ways)
{
    memcpy(ways, e->chosen, (size_t)e->problem.num_choices * sizeof *ways);
}

void memfit_evaluator_free(Evaluator *e)
{
    free(e);
}

/* An evaluator of the problem, whose arrays must outlive it; NULL if there is no memory. */
Evaluator *memfit_evaluator_new(const Problem *problem)
{
    Evaluator blank = {.problem = *problem};
    Arena measure = {NULL, sizeof blank};
    lay_out(&blank, &measure);
    Evaluator *e = calloc(1, measure.used);
    if (!e)
        return NULL;
    e->problem = *problem;
    lay_out(e, &(Arena){(char *)e, sizeof *e});
    for (int32_t k = 0; k < problem->num_forward; k++)
        e->ops[k] = e->position[k] = k; /* never re-runs; the rest of their lists is zero as it is */
    lay_down(e);
    return e;
}
