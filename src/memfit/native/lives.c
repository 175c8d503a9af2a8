/* plan/lower.py in C, second pass: `_Lives`, and `choose_ways`. See lower.c. */

#include <string.h>

#include "evaluator.h"

/* What the op at this position uses, apart from what it remakes. */
static inline Span touched_at(const Evaluator *e, int32_t k)
{
    return list(e->again[k] ? e->problem.rerun_touches : e->problem.touches, e->ops[k]);
}

/* Find the earliest position for each gradient: whole, in eager's order, its source not read any more. */
static void give(Evaluator *e)
{
    const Problem *p = &e->problem;
    int32_t earliest = (int32_t)p->num_forward;
    for (int64_t index = 0; index < p->num_handings; index++) {
        int32_t ready_op = p->handing_ready_ops[index], source = p->handing_source_storages[index];
        int32_t last_op = p->handing_last_ops[index];
        if (ready_op >= 0 && earliest < e->position[ready_op] + 1)
            earliest = e->position[ready_op] + 1;
        /* A hook on the finished gradient may write to the parameter. */
        if (last_op >= 0 && earliest < e->position[last_op] + 1)
            earliest = e->position[last_op] + 1;
        if (source >= 0 && earliest < e->last_touch[source] + 1)
            earliest = e->last_touch[source] + 1;
        if (index == p->num_handings - 1)
            earliest = e->length; /* what is left is there for its effects, and runs before backward is over */
        e->gives_at[index] = earliest;
        e->given_at[p->handing_storages[index]] = earliest;
    }
}

/* Into the chain of its position, ascending. The walk goes back in time, so it mostly goes in front. */
static void free_before(Evaluator *e, int32_t position, int32_t storage)
{
    int32_t *link = &e->frees_before_head[position];
    while (*link >= 0 && *link < storage)
        link = &e->frees_before_next[*link];
    e->frees_before_next[storage] = *link;
    *link = storage;
}

/* Where a storage that was sent is to be back: where it is used, or at the op that its state says. */
static inline int32_t due_at(const Evaluator *e, int32_t storage)
{
    int32_t back_by = (e->states[storage] - AWAY) / (int32_t)e->problem.num_tiers, used_at = e->fetched_at[storage];
    if (back_by == 0)
        return used_at;
    if (back_by < e->problem.num_forward)
        back_by = (int32_t)e->problem.num_forward;
    return e->position[back_by] < used_at ? e->position[back_by] : used_at;
}

/* What is met for the first time in one of its lives ends here. Goes down, as the lists are filled from the back. */
static void end_lives(Evaluator *e, Span storages, int32_t k, int32_t *frees_start, int32_t *sends_start)
{
    const Problem *p = &e->problem;
    for (const int32_t *s = storages.end; s-- > storages.begin;) {
        int32_t storage = *s;
        if (e->states[storage] >= AWAY) {
            if (k >= p->num_forward) {
                e->first_use[storage] = k;
            } else if (e->first_use[storage] >= 0) {
                e->sends[--*sends_start] = storage;
                e->fetched_at[storage] = e->first_use[storage];
                e->first_use[storage] = -1;
                e->any_sooner |= due_at(e, storage) < e->fetched_at[storage];
                e->in_use[storage] = true; /* it ends here, by being sent */
                e->num_sent++;
            }
        }
        if (e->in_use[storage])
            continue;
        e->in_use[storage] = true;
        if (e->given_at[storage] > k)
            free_before(e, e->given_at[storage], storage);
        else
            e->frees[--*frees_start] = storage;
    }
}

/* Walk back in time. */
static void end(Evaluator *e)
{
    const Problem *p = &e->problem;
    memset(e->in_use, 0, (size_t)p->num_storages);
    fill(e->first_use, p->num_storages, -1);
    fill(e->fetched_at, p->num_storages, -1);
    fill(e->frees_before_head, e->length + 1, -1);
    e->num_sent = 0;
    e->any_sooner = false;
    int32_t frees_start = (int32_t)(p->num_storages + p->max_rerun_made), sends_start = (int32_t)p->num_storages;
    e->frees_starts[e->length] = frees_start;
    e->sends_starts[p->num_forward] = sends_start;
    for (int32_t k = e->length; k-- > 0;) {
        Span remade = remade_at(e, k);
        end_lives(e, remade, k, &frees_start, &sends_start);
        end_lives(e, touched_at(e, k), k, &frees_start, &sends_start);
        e->frees_starts[k] = frees_start;
        if (k < p->num_forward)
            e->sends_starts[k] = sends_start;
        for (const int32_t *s = remade.begin; s < remade.end; s++)
            e->in_use[*s] = false;
    }
}

/* What is fetched for an op is among what it uses, and in the same order. */
static void list_fetched(Evaluator *e)
{
    int32_t count = 0;
    e->fetched_starts[e->problem.num_forward] = 0;
    for (int32_t k = (int32_t)e->problem.num_forward; k < e->length; k++) {
        if (count < e->num_sent) {
            Span touched = touched_at(e, k);
            for (const int32_t *s = touched.begin; s < touched.end; s++)
                if (e->fetched_at[*s] == k)
                    e->fetched[count++] = *s;
        }
        e->fetched_starts[k + 1] = count;
    }
}

/* Where all that was sent is to be back. What is used there comes behind what only has to be back by then. */
static void list_due(Evaluator *e)
{
    e->due_starts = e->fetched_starts;
    e->due = e->fetched;
    if (!e->any_sooner)
        return;
    e->due_starts = e->sooner_starts;
    e->due = e->sooner;
    fill(e->due_starts, e->length + 1, 0);
    for (int32_t s = 0; s < e->problem.num_storages; s++)
        if (e->fetched_at[s] >= 0)
            e->due_starts[due_at(e, s) + 1]++;
    for (int32_t k = 0; k < e->length; k++)
        e->due_starts[k + 1] += e->due_starts[k];
    /* Filled from the back, so that each start goes down to where its list begins: used there first, and the last
     * numbers first. The start of a position is the end of the one before until its own list is filled. */
    for (int pass = 0; pass < 2; pass++)
        for (int32_t s = (int32_t)e->problem.num_storages; s-- > 0;)
            if (e->fetched_at[s] >= 0 && (due_at(e, s) < e->fetched_at[s]) == pass)
                e->due[--e->due_starts[due_at(e, s) + 1]] = s;
    memmove(e->due_starts, e->due_starts + 1, (size_t)e->length * sizeof *e->due_starts);
    e->due_starts[e->length] = e->num_sent;
}

static inline int64_t bytes_of(const Evaluator *e, Span storages)
{
    int64_t sum = 0;
    for (const int32_t *s = storages.begin; s < storages.end; s++)
        sum += e->problem.storage_bytes[*s];
    return sum;
}

/* The op at this position needs so much, transfers that linger aside. */
static inline void need(Evaluator *e, int32_t k, int64_t need_bytes)
{
    e->needs[k] = need_bytes;
    if (need_bytes <= e->limit_bytes)
        return;
    int64_t excess_bytes = need_bytes - e->limit_bytes;
    e->sum_excess_bytes += excess_bytes;
    if (e->max_excess_bytes < excess_bytes)
        e->max_excess_bytes = excess_bytes;
}

/* Add up the bytes at every op; where it has a choice, without its workspace. False if one is above the budget, and no
 * plan that is can be better. */
static bool count(Evaluator *e)
{
    const Problem *p = &e->problem;
    int64_t live = e->base_bytes, most_bytes = e->incumbent.violation_bytes == 0 ? e->limit_bytes : INT64_MAX;
    e->max_excess_bytes = e->sum_excess_bytes = 0;
    e->num_choice_positions = 0;
    for (int32_t k = 0; k < e->length; k++) {
        int32_t op = e->ops[k];
        int64_t discarded_bytes = 0;
        if (k >= p->num_forward) {
            if (k == p->num_forward)
                live += e->tangent_bytes;
            for (int32_t s = e->frees_before_head[k]; s >= 0; s = e->frees_before_next[s])
                live -= p->storage_bytes[s];
            live += bytes_of(e, due_for(e, k));
        }
        if (e->again[k]) {
            int64_t remade_bytes = bytes_of(e, remade_at(e, k));
            discarded_bytes = e->rerun_made_bytes[op] - remade_bytes;
            live += remade_bytes;
        } else {
            live += e->made_bytes[op];
        }
        int64_t need_bytes = live + discarded_bytes;
        if (need_bytes + e->least_workspace_bytes[op] > most_bytes)
            return false;
        if (e->choice_of[op] < 0) {
            need(e, k, need_bytes + e->workspace_bytes[op]);
        } else {
            e->needs[k] = need_bytes;
            e->choice_positions[e->num_choice_positions++] = k;
        }
        live -= bytes_of(e, list_of(e->frees_starts, e->frees, k));
        if (k < p->num_forward)
            live -= bytes_of(e, list_of(e->sends_starts, e->sends, k));
    }
    return true;
}

/* For each op that has a choice the fastest way that may be taken and fits wherever it runs, else the one that needs
 * least. */
static void choose_ways(Evaluator *e)
{
    const Problem *p = &e->problem;
    for (int64_t choice = 0; choice < p->num_choices; choice++)
        e->room_bytes[choice] = INT64_MAX;
    for (int32_t i = 0; i < e->num_choice_positions; i++) {
        int32_t k = e->choice_positions[i], choice = e->choice_of[e->ops[k]];
        if (e->room_bytes[choice] > e->limit_bytes - e->needs[k])
            e->room_bytes[choice] = e->limit_bytes - e->needs[k];
    }
    for (int64_t choice = 0; choice < p->num_choices; choice++) {
        int32_t op = p->choice_ops[choice], last = p->way_starts[choice + 1] - 1;
        int32_t way = p->way_starts[choice] + p->first_ways[choice];
        while (way < last && p->way_workspace_bytes[way] > e->room_bytes[choice])
            way++;
        e->chosen[choice] = way - p->way_starts[choice];
        e->op_ps[op] = p->way_ps[way];
        e->rerun_ps[op] = p->way_rerun_ps[way];
        e->workspace_bytes[op] = p->way_workspace_bytes[way];
    }
}

/* Add what the chosen ways need, and take longer than the fastest. */
static void add_ways(Evaluator *e)
{
    for (int32_t i = 0; i < e->num_choice_positions; i++) {
        int32_t k = e->choice_positions[i], op = e->ops[k];
        int64_t more_ps = e->again[k] ? e->rerun_ps[op] - e->least_rerun_ps[op] : e->op_ps[op] - e->least_op_ps[op];
        need(e, k, e->needs[k] + e->workspace_bytes[op]);
        e->compute_ps += more_ps;
        e->forward_ps += k < e->problem.num_forward ? more_ps : 0;
    }
}

int64_t memfit_lives(Evaluator *e)
{
    give(e);
    end(e);
    list_fetched(e);
    list_due(e);
    if (!count(e))
        return NOT_BETTER;
    e->forward_ps = e->least_forward_ps;
    if (e->num_choice_positions) {
        choose_ways(e);
        add_ways(e);
    }
    /* What is above the budget with no transfer lingering stays above it, and compute takes its time even if it never
     * waits: so much is certain before any transfer has a place. */
    return may_improve(e, violation(e->max_excess_bytes, e->sum_excess_bytes), e->compute_ps) ? EVALUATED : NOT_BETTER;
}
