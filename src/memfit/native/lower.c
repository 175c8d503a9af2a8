/* plan/lower.py in C.
 *
 * Each pass is one pass there, and does the same in the same order: `_recompute` is schedule.c, `_Lives` and
 * `choose_ways` are lives.c, `_Emitter` is here. Instructions are equal one for one. Change both together;
 * tests/test_evaluate*.py compare them. Only here a trial ends as soon as it is certain that it is not better than what
 * it was to beat.
 *
 * Nothing is allocated while evaluating. What Python keeps as a list per position is here one flat array, in the order
 * of the positions, as most positions have no more than one or two entries.
 */

#include <string.h>

#include "evaluator.h"

/* Insertion sort: the lists are short, and all but a few entries are in order. */
static void sort(int32_t *begin, int32_t *end)
{
    for (int32_t *next = begin + 1; next < end; next++) {
        int32_t number = *next, *at = next;
        for (; at > begin && at[-1] > number; at--)
            *at = at[-1];
        *at = number;
    }
}

static inline void emit(Evaluator *e, int32_t kind, int32_t number, int32_t tier)
{
    e->instructions[e->num_instructions++] = (Instruction){kind, number, tier};
}

static void emit_frees(Evaluator *e, Span storages)
{
    for (const int32_t *s = storages.begin; s < storages.end; s++) {
        emit(e, FREE, *s, 0);
        e->is_here[*s] = false;
    }
}

static void linger(Evaluator *e, int32_t storage, int32_t channel, int64_t duration_ps)
{
    transfer(e, storage, channel, duration_ps);
    if (e->queue_head[channel] < 0)
        e->queue_head[channel] = storage;
    else
        e->queue_next[e->queue_tail[channel]] = storage;
    e->queue_tail[channel] = storage;
    e->queue_next[storage] = -1;
    e->started[storage] = e->num_started++;
    e->num_lingering++;
    e->lingering_bytes += e->problem.storage_bytes[storage];
}

static int32_t take_out(Evaluator *e, int64_t channel)
{
    int32_t storage = e->queue_head[channel];
    e->queue_head[channel] = e->queue_next[storage];
    e->num_lingering--;
    e->lingering_bytes -= e->problem.storage_bytes[storage];
    return storage;
}

/* Take out the transfers that have ended by then, in the order they started. Those of one channel are the first of its
 * queue, so the queues only have to be merged. */
static int32_t release_ended(Evaluator *e, int64_t by_ps)
{
    int32_t count = 0;
    while (e->num_lingering) {
        int64_t chosen = -1;
        for (int64_t channel = 0; channel < e->problem.num_channels; channel++) {
            int32_t s = e->queue_head[channel];
            if (s >= 0 && e->end_ps[s] <= by_ps
                && (chosen < 0 || e->started[s] < e->started[e->queue_head[chosen]]))
                chosen = channel;
        }
        if (chosen < 0)
            break;
        e->released[count++] = take_out(e, chosen);
    }
    return count;
}

/* Take out the transfers that have ended by now, and wait for as many more as the next op needs gone. */
static int32_t release(Evaluator *e, int64_t need_bytes)
{
    int32_t count = release_ended(e, e->clock_ps);
    while (e->num_lingering && need_bytes + e->lingering_bytes > e->limit_bytes) {
        int64_t chosen = -1;
        for (int64_t channel = 0; channel < e->problem.num_channels; channel++) {
            int32_t s = e->queue_head[channel];
            if (s < 0)
                continue;
            int32_t best = chosen < 0 ? s : e->queue_head[chosen];
            /* Of those that end together the one that started first. */
            if (chosen < 0 || e->end_ps[s] < e->end_ps[best]
                || (e->end_ps[s] == e->end_ps[best] && e->started[s] < e->started[best]))
                chosen = channel;
        }
        int32_t storage = take_out(e, chosen);
        if (e->clock_ps < e->end_ps[storage])
            e->clock_ps = e->end_ps[storage];
        e->released[count++] = storage;
    }
    return count;
}

static void emit_forward(Evaluator *e)
{
    const Problem *p = &e->problem;
    reset_transfers(e);
    for (int32_t k = 0; k < p->num_forward; k++) {
        int32_t count = release(e, e->needs[k]);
        for (int32_t i = 0; i < count; i++)
            emit(e, SEND_WAIT, e->released[i], 0);
        emit(e, RUN, k, 0);
        e->clock_ps += e->op_ps[k];
        Span makes = list(p->makes, k);
        for (const int32_t *s = makes.begin; s < makes.end; s++)
            e->is_here[*s] = true;
        emit_frees(e, list_of(e->frees_starts, e->frees, k));
        Span sends = list_of(e->sends_starts, e->sends, k);
        for (const int32_t *s = sends.begin; s < sends.end; s++) {
            int32_t tier = tier_of(e, *s);
            emit(e, SEND_START, *s, tier);
            e->is_here[*s] = false; /* from the boundary on, which is when we ask */
            linger(e, *s, p->send_channels[tier], p->send_ps[tier * p->num_storages + *s]);
            e->clock_ps += p->send_drag_ps[tier * p->num_storages + *s];
        }
    }
    int32_t count = release_ended(e, INT64_MAX);
    for (int32_t i = 0; i < count; i++)
        emit(e, SEND_WAIT, e->released[i], 0);
}

static inline void start_first(Evaluator *e, int32_t position, int32_t storage)
{
    e->starts_next[storage] = e->starts_head[position];
    e->starts_head[position] = storage;
}

/* Run the backward half in reversed time: which fetches start in front of which position. */
static void plan_fetches(Evaluator *e)
{
    const Problem *p = &e->problem;
    fill(e->starts_head, e->length + 1, -1);
    if (!e->num_sent)
        return;
    reset_transfers(e);
    for (int32_t k = e->length; k-- > p->num_forward;) {
        int32_t count = release(e, e->needs[k]);
        for (int32_t i = 0; i < count; i++)
            start_first(e, k + 1, e->released[i]);
        e->clock_ps += (e->again[k] ? e->rerun_ps : e->op_ps)[e->ops[k]];
        Span due = due_for(e, k);
        for (const int32_t *s = due.end; s-- > due.begin;) {
            int32_t tier = tier_of(e, *s);
            linger(e, *s, p->fetch_channels[tier], p->fetch_ps[tier * p->num_storages + *s]);
            e->clock_ps += p->fetch_drag_ps[tier * p->num_storages + *s];
        }
    }
    int32_t count = release_ended(e, INT64_MAX);
    for (int32_t i = 0; i < count; i++)
        start_first(e, (int32_t)p->num_forward, e->released[i]);
}

static void emit_rerun(Evaluator *e, int32_t k)
{
    Span frees = list_of(e->frees_starts, e->frees, k);
    Span makes = list(e->problem.rerun_makes, e->ops[k]), kept = remade_at(e, k);
    int32_t count = 0;
    emit(e, RERUN, e->ops[k], 0);
    for (const int32_t *s = frees.begin; s < frees.end; s++)
        e->ended[count++] = *s;
    /* A second copy of what is here already is dropped with the call; of what is not here, by us. */
    for (const int32_t *s = makes.begin; s < makes.end; s++)
        if (!e->is_here[*s] && !contains(kept, *s))
            e->ended[count++] = *s;
    for (const int32_t *s = kept.begin; s < kept.end; s++)
        e->is_here[*s] = true;
    sort(e->ended, e->ended + count);
    emit_frees(e, (Span){e->ended, e->ended + count});
}

static void emit_backward(Evaluator *e)
{
    const Problem *p = &e->problem;
    int64_t gradient = 0;
    for (int32_t k = (int32_t)p->num_forward; k <= e->length; k++) {
        for (; gradient < p->num_handings && e->gives_at[gradient] == k; gradient++)
            emit(e, GIVE, (int32_t)gradient, 0);
        for (int32_t s = e->frees_before_head[k]; s >= 0; s = e->frees_before_next[s])
            emit_frees(e, (Span){&s, &s + 1});
        for (int32_t s = e->starts_head[k]; s >= 0; s = e->starts_next[s]) {
            emit(e, FETCH_START, s, tier_of(e, s));
            e->is_here[s] = true;
        }
        if (k == e->length)
            break;
        Span fetched = fetched_for(e, k);
        for (const int32_t *s = fetched.begin; s < fetched.end; s++)
            emit(e, FETCH_WAIT, *s, 0);
        if (e->again[k]) {
            emit_rerun(e, k);
            continue;
        }
        emit(e, RUN, e->ops[k], 0);
        Span makes = list(p->makes, e->ops[k]);
        for (const int32_t *s = makes.begin; s < makes.end; s++)
            e->is_here[*s] = true;
        emit_frees(e, list_of(e->frees_starts, e->frees, k));
    }
}

/* When all sends have ended: compute waits for them at the boundary. */
static int64_t forward_end_ps(const Evaluator *e)
{
    int64_t end_ps = e->clock_ps;
    for (int64_t channel = 0; channel < e->problem.num_channels; channel++)
        end_ps = end_ps < e->free_ps[channel] ? e->free_ps[channel] : end_ps;
    return end_ps;
}

int64_t memfit_lower(Evaluator *e)
{
    const Problem *p = &e->problem;
    int64_t verdict = memfit_schedule(e);
    if (verdict == EVALUATED)
        verdict = memfit_lives(e);
    if (verdict != EVALUATED)
        return verdict;
    memcpy(e->is_here, p->is_present, (size_t)p->num_storages);
    e->num_instructions = 0;
    emit_forward(e);
    if (!may_improve(e, violation(e->max_excess_bytes, e->sum_excess_bytes),
                     forward_end_ps(e) + e->compute_ps - e->forward_ps))
        return NOT_BETTER;
    emit(e, BOUNDARY, 0, 0);
    plan_fetches(e);
    emit_backward(e);
    return EVALUATED;
}
