/* The library's face: states of storages in, peak and time of the lowered step out. */

#include <stdlib.h>
#include <string.h>

#include "evaluator.h"

/* The number of the first storage whose state does not exist, or -1: then `outcome` is filled in, and `instructions`
 * unless it is NULL. It has room for problem.max_instructions. */
int64_t memfit_evaluate(Evaluator *e, const int8_t *states, int64_t limit_bytes, Outcome *outcome,
                        Instruction *instructions)
{
    const Problem *p = &e->problem;
    for (int64_t s = 0; s < p->num_storages; s++)
        if (states[s] < 0 || states[s] >= AWAY + p->num_tiers)
            return s;
    e->states = states;
    e->limit_bytes = limit_bytes;
    memfit_lower(e);
    memfit_simulate(e, outcome);
    if (instructions)
        memcpy(instructions, e->instructions, (size_t)e->num_instructions * sizeof *instructions);
    return -1;
}

/* One block of memory for everything. Without a block it only counts. */
typedef struct {
    char *block;
    size_t used;
} Arena;

static void *take(Arena *arena, int64_t count, size_t size)
{
    size_t offset = (arena->used + 15) & ~(size_t)15;
    arena->used = offset + (size_t)count * size;
    return arena->block ? arena->block + offset : NULL;
}

#define TAKE(field, count) (e->field = take(arena, (count), sizeof *e->field))

static void lay_out(Evaluator *e, Arena *arena)
{
    const Problem *p = &e->problem;
    int64_t num_storages = p->num_storages, num_channels = p->num_channels, max_length = p->max_length;
    TAKE(ops, max_length);
    TAKE(again, max_length);
    TAKE(remade_starts, max_length + 1);
    TAKE(remade, num_storages);
    TAKE(position, p->num_ops);
    TAKE(missing, num_storages);
    TAKE(stack, num_storages);
    TAKE(burst, p->num_forward / 64 + 1);
    TAKE(needs, max_length);
    TAKE(last_touch, num_storages);
    TAKE(given_at, num_storages);
    TAKE(gives_at, p->num_handings);
    TAKE(in_use, num_storages);
    TAKE(first_use, num_storages);
    TAKE(fetched_at, num_storages);
    TAKE(frees_starts, max_length + 1);
    TAKE(frees, 2 * num_storages); /* each has at most two lives here */
    TAKE(sends_starts, p->num_forward + 1);
    TAKE(sends, num_storages);
    TAKE(fetched_starts, max_length + 1);
    TAKE(fetched, num_storages);
    TAKE(frees_before_head, max_length + 1);
    TAKE(frees_before_next, num_storages);
    TAKE(free_ps, num_channels);
    TAKE(is_here, num_storages);
    TAKE(ended, num_storages);
    TAKE(starts_head, max_length + 1);
    TAKE(starts_next, num_storages);
    TAKE(instructions, p->max_instructions);
    TAKE(queue_head, num_channels);
    TAKE(queue_tail, num_channels);
    TAKE(queue_next, num_storages);
    TAKE(end_ps, num_storages);
    TAKE(started, num_storages);
    TAKE(released, num_storages);
    TAKE(present, num_storages);
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
    return e;
}
