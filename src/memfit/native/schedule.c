/* plan/lower.py in C, first pass: `_recompute`. See lower.c. */

#include <string.h>

#include "evaluator.h"

static inline bool in_burst(const Evaluator *e, int32_t op)
{
    return e->burst[op >> 6] >> (op & 63) & 1;
}

static inline bool is_whole(const Evaluator *e, int32_t storage)
{
    Span writers = list(e->problem.writers, storage);
    for (const int32_t *w = writers.begin; w < writers.end; w++)
        if (!in_burst(e, *w))
            return false;
    return true;
}

static inline int32_t push_missing(Evaluator *e, Span storages, int32_t depth)
{
    for (const int32_t *s = storages.begin; s < storages.end; s++)
        if (e->missing[*s] == MISSING) {
            e->missing[*s] = WANTED; /* on the stack at most once, and made by this burst: never wanted again */
            e->stack[depth++] = *s;
        }
    return depth;
}

static void append(Evaluator *e, int32_t op, bool again)
{
    e->ops[e->length] = op;
    e->again[e->length] = again;
    e->remade_starts[++e->length] = e->num_remade;
}

/* Put the ops of the burst in front of this op into the schedule, ascending. False if there is no room for them. */
static bool append_burst(Evaluator *e, int32_t op, int32_t first_word, int32_t last_word)
{
    const Problem *p = &e->problem;
    bool has_room = true;
    for (int32_t word = first_word; word <= last_word && has_room; word++)
        for (uint64_t bits = e->burst[word]; bits; bits &= bits - 1) {
            int32_t again = word * 64 + __builtin_ctzll(bits);
            Span makes = list(p->rerun_makes, again), sources = list(p->rerun_source_touches, again);
            e->num_rerun_made += makes.end - makes.begin;
            /* Besides this one, all ops from `op` on come after it. */
            if (e->length + 1 + p->num_ops - op > p->max_length || e->num_rerun_made > p->max_rerun_made) {
                has_room = false;
                break;
            }
            for (const int32_t *s = makes.begin; s < makes.end; s++)
                if (e->missing[*s] != HERE && is_whole(e, *s)) {
                    e->remade[e->num_remade++] = *s; /* lives on, asked for or not */
                    e->missing[*s] = HERE;
                    if (op < -e->states[*s])
                        e->passing[e->num_passing++] = *s;
                }
            for (const int32_t *s = sources.begin; s < sources.end; s++)
                e->last_touch[*s] = e->length;
            e->compute_ps += e->least_rerun_ps[again];
            append(e, again, true);
        }
    memset(e->burst + first_word, 0, (size_t)(last_word - first_word + 1) * sizeof *e->burst);
    return has_room;
}

/* What was made again and is not to be held: gone where it will be held from now on, or, as something else is to be
 * made again, where this op does not use it. */
static void let_go(Evaluator *e, int32_t op, bool makes_again)
{
    Span touched = list(e->problem.touches, op);
    int32_t count = 0;
    for (int32_t i = 0; i < e->num_passing; i++) {
        int32_t storage = e->passing[i];
        if (op >= -e->states[storage] || (makes_again && !contains(touched, storage)))
            e->missing[storage] = MISSING;
        else
            e->passing[count++] = storage;
    }
    e->num_passing = count;
}

int64_t memfit_schedule(Evaluator *e)
{
    const Problem *p = &e->problem;
    for (int32_t i = 0; i < e->num_recomputable; i++) {
        int32_t storage = e->recomputable[i], state = e->states[storage];
        e->missing[storage] = state == DROP || state < 0 ? MISSING : HERE;
    }
    fill(e->last_touch, p->num_storages, -1);
    e->length = (int32_t)p->num_forward;
    e->num_remade = e->num_passing = 0;
    e->num_rerun_made = 0;
    e->compute_ps = e->least_ps;
    for (int32_t op = e->length; op < p->num_ops; op++) {
        int32_t first_word = INT32_MAX, last_word = -1;
        if (e->num_passing)
            let_go(e, op, false);
        int32_t depth = push_missing(e, list(p->touches, op), 0);
        if (depth && e->num_passing)
            let_go(e, op, true);
        while (depth) {
            Span writers = list(p->writers, e->stack[--depth]);
            for (const int32_t *w = writers.begin; w < writers.end; w++) {
                if (in_burst(e, *w))
                    continue;
                int32_t word = *w >> 6;
                e->burst[word] |= (uint64_t)1 << (*w & 63);
                first_word = word < first_word ? word : first_word;
                last_word = word > last_word ? word : last_word;
                depth = push_missing(e, list(p->rerun_touches, *w), depth);
            }
        }
        if (last_word >= 0) {
            if (!append_burst(e, op, first_word, last_word))
                return OUTGROWN;
            if (!may_improve(e, 0, e->compute_ps))
                return NOT_BETTER;
        }
        e->position[op] = e->length;
        append(e, op, false);
    }
    return may_improve(e, 0, e->compute_ps) ? EVALUATED : NOT_BETTER;
}
