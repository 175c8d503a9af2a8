/* plan/lower.py in C.
 *
 * Each pass here is one pass there, under the same name, and does the same in the same order: instructions are equal
 * one for one. Change both together; tests/test_evaluate.py compares them.
 *
 * Nothing is allocated while evaluating. What Python keeps as a list per position is here one flat array, in the order
 * of the positions, as most positions have no more than one or two entries.
 */

#include <string.h>

#include "evaluator.h"

static inline Span list_of(const int32_t *starts, const int32_t *items, int64_t index)
{
    return list((Lists){starts, items}, index);
}

static inline bool contains(Span span, int32_t number)
{
    for (const int32_t *s = span.begin; s < span.end; s++)
        if (*s == number)
            return true;
    return false;
}

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

static void fill(int32_t *numbers, int64_t count, int32_t number)
{
    for (int64_t i = 0; i < count; i++)
        numbers[i] = number;
}

/* --- 1. Re-runs ------------------------------------------------------------------------------------------------- */

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

/* Put the ops of the burst into the schedule, ascending. */
static void append_burst(Evaluator *e, int32_t first_word, int32_t last_word)
{
    for (int32_t word = first_word; word <= last_word; word++)
        for (uint64_t bits = e->burst[word]; bits; bits &= bits - 1) {
            int32_t again = word * 64 + __builtin_ctzll(bits);
            Span makes = list(e->problem.rerun_makes, again);
            for (const int32_t *s = makes.begin; s < makes.end; s++)
                if (e->missing[*s] != HERE && is_whole(e, *s)) {
                    e->remade[e->num_remade++] = *s; /* lives on, asked for or not */
                    e->missing[*s] = HERE;
                }
            append(e, again, true);
        }
    memset(e->burst + first_word, 0, (size_t)(last_word - first_word + 1) * sizeof *e->burst);
}

static void recompute(Evaluator *e)
{
    const Problem *p = &e->problem;
    for (int64_t s = 0; s < p->num_storages; s++)
        e->missing[s] = e->states[s] == DROP && p->is_recomputable[s] ? MISSING : HERE;
    e->length = (int32_t)p->num_forward;
    e->num_remade = 0;
    for (int32_t op = e->length; op < p->num_ops; op++) {
        int32_t first_word = INT32_MAX, last_word = -1;
        int32_t depth = push_missing(e, list(p->touches, op), 0);
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
        if (last_word >= 0)
            append_burst(e, first_word, last_word);
        e->position[op] = e->length;
        append(e, op, false);
    }
}

/* --- 2. Lives --------------------------------------------------------------------------------------------------- */

static inline Span remade_at(const Evaluator *e, int32_t k)
{
    return list_of(e->remade_starts, e->remade, k);
}

/* What the op at this position uses, apart from what it remakes. */
static inline Span touched_at(const Evaluator *e, int32_t k)
{
    return list(e->again[k] ? e->problem.rerun_touches : e->problem.touches, e->ops[k]);
}

/* Find the earliest position for each gradient: whole, in eager's order, its source not read any more. */
static void lives_give(Evaluator *e)
{
    const Problem *p = &e->problem;
    fill(e->last_touch, p->num_storages, -1);
    fill(e->given_at, p->num_storages, -1);
    for (int32_t k = 0; k < e->length; k++) {
        Span touched = list(e->again[k] ? p->rerun_source_touches : p->source_touches, e->ops[k]);
        for (const int32_t *s = touched.begin; s < touched.end; s++)
            e->last_touch[*s] = k;
    }
    int32_t earliest = (int32_t)p->num_forward;
    for (int64_t index = 0; index < p->num_handings; index++) {
        int32_t ready_op = p->handing_ready_ops[index], source = p->handing_source_storages[index];
        if (ready_op >= 0 && earliest < e->position[ready_op] + 1)
            earliest = e->position[ready_op] + 1;
        if (source >= 0 && earliest < e->last_touch[source] + 1)
            earliest = e->last_touch[source] + 1; /* a hook on the finished gradient may write to the parameter */
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
static void lives_end(Evaluator *e)
{
    const Problem *p = &e->problem;
    memset(e->in_use, 0, (size_t)p->num_storages);
    fill(e->first_use, p->num_storages, -1);
    fill(e->fetched_at, p->num_storages, -1);
    fill(e->frees_before_head, e->length + 1, -1);
    e->num_sent = 0;
    int32_t frees_start = (int32_t)(2 * p->num_storages), sends_start = (int32_t)p->num_storages;
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

static inline int64_t bytes_of(const Evaluator *e, Span storages)
{
    int64_t sum = 0;
    for (const int32_t *s = storages.begin; s < storages.end; s++)
        sum += e->problem.storage_bytes[*s];
    return sum;
}

static inline Span fetched_for(const Evaluator *e, int32_t k)
{
    return list_of(e->fetched_starts, e->fetched, k);
}

/* Add up the bytes at every op. */
static void lives_count(Evaluator *e)
{
    const Problem *p = &e->problem;
    int64_t live = 0;
    for (int64_t s = 0; s < p->num_storages; s++)
        live += p->is_present[s] ? p->storage_bytes[s] : 0;
    for (int32_t k = 0; k < e->length; k++) {
        int32_t op = e->ops[k];
        int64_t made_bytes = bytes_of(e, list(e->again[k] ? p->rerun_makes : p->makes, op)), discarded_bytes = 0;
        if (k == p->num_forward)
            live += bytes_of(e, (Span){p->tangents, p->tangents + p->num_tangents});
        if (k >= p->num_forward) {
            for (int32_t s = e->frees_before_head[k]; s >= 0; s = e->frees_before_next[s])
                live -= p->storage_bytes[s];
            live += bytes_of(e, fetched_for(e, k));
        }
        if (e->again[k]) {
            int64_t remade_bytes = bytes_of(e, remade_at(e, k));
            discarded_bytes = made_bytes - remade_bytes;
            made_bytes = remade_bytes;
        }
        live += made_bytes;
        e->needs[k] = live + discarded_bytes + p->workspace_bytes[op];
        live -= bytes_of(e, list_of(e->frees_starts, e->frees, k));
        if (k < p->num_forward)
            live -= bytes_of(e, list_of(e->sends_starts, e->sends, k));
    }
}

/* --- 3. Instructions -------------------------------------------------------------------------------------------- */

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

static inline int32_t tier_of(const Evaluator *e, int32_t storage)
{
    return e->states[storage] - AWAY;
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
        e->clock_ps += p->op_ps[k];
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
        e->clock_ps += (e->again[k] ? p->rerun_ps : p->op_ps)[e->ops[k]];
        Span fetched = fetched_for(e, k);
        for (const int32_t *s = fetched.end; s-- > fetched.begin;) {
            int32_t tier = tier_of(e, *s);
            linger(e, *s, p->fetch_channels[tier], p->fetch_ps[tier * p->num_storages + *s]);
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

void memfit_lower(Evaluator *e)
{
    const Problem *p = &e->problem;
    recompute(e);
    lives_give(e);
    lives_end(e);
    list_fetched(e);
    lives_count(e);
    memcpy(e->is_here, p->is_present, (size_t)p->num_storages);
    e->num_instructions = 0;
    emit_forward(e);
    emit(e, BOUNDARY, 0, 0);
    plan_fetches(e);
    emit_backward(e);
}
