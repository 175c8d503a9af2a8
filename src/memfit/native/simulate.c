/* plan/simulate.py in C: the same figures to the last bit. */

#include <string.h>

#include "evaluator.h"

static inline void arrive(Evaluator *e, int32_t storage, int64_t *live)
{
    if (!e->present[storage]) {
        e->present[storage] = true;
        *live += e->problem.storage_bytes[storage];
    }
}

static inline int64_t leave(Evaluator *e, int32_t storage, int64_t *live)
{
    e->present[storage] = false;
    return *live -= e->problem.storage_bytes[storage];
}

static inline void wait_for(Evaluator *e, int32_t storage, Outcome *outcome)
{
    if (e->end_ps[storage] > e->clock_ps) {
        outcome->stall_ps += e->end_ps[storage] - e->clock_ps;
        e->clock_ps = e->end_ps[storage];
    }
}

/* Results arrive. Bytes that count while the op runs and not after it: copies of what is here already. */
static inline int64_t arrive_from(Evaluator *e, int32_t op, bool again, int64_t *live)
{
    int64_t discarded_bytes = 0;
    if (again) {
        Span makes = list(e->problem.rerun_makes, op);
        for (const int32_t *s = makes.begin; s < makes.end; s++) {
            if (e->present[*s])
                discarded_bytes += e->problem.storage_bytes[*s];
            arrive(e, *s, live);
        }
        return discarded_bytes;
    }
    Span made = list(e->problem.made, op);
    for (const int32_t *s = made.begin; s < made.end; s++)
        arrive(e, *s, live);
    return discarded_bytes;
}

/* plan/simulate.py and plan/ledger.py in one walk. */
static inline void exceed(const Evaluator *e, int64_t total, Outcome *outcome)
{
    if (total <= e->limit_bytes)
        return;
    int64_t excess_bytes = total - e->limit_bytes;
    outcome->sum_excess_bytes += excess_bytes;
    if (outcome->max_excess_bytes < excess_bytes)
        outcome->max_excess_bytes = excess_bytes;
}

void memfit_simulate(Evaluator *e, Outcome *outcome)
{
    const Problem *p = &e->problem;
    int64_t live = e->base_bytes;
    *outcome = (Outcome){.peak_bytes = INT64_MIN, .num_instructions = e->num_instructions};
    reset_transfers(e);
    memcpy(e->present, p->is_present, (size_t)p->num_storages);
    for (int32_t index = 0; index < e->num_instructions; index++) {
        int32_t kind = e->instructions[index].kind, number = e->instructions[index].number;
        int64_t tier = e->instructions[index].tier, total = 0;
        switch (kind) {
        case RUN:
        case RERUN:
            total = arrive_from(e, number, kind == RERUN, &live) + live + e->workspace_bytes[number];
            e->clock_ps += (kind == RERUN ? e->rerun_ps : e->op_ps)[number];
            outcome->num_reruns += kind == RERUN;
            exceed(e, total, outcome);
            break;
        case BOUNDARY:
            for (int64_t t = 0; t < p->num_tangents; t++)
                arrive(e, p->tangents[t], &live);
            total = live;
            break;
        case SEND_START:
            transfer(e, number, p->send_channels[tier], p->send_ps[tier * p->num_storages + number]);
            e->clock_ps += p->send_drag_ps[tier * p->num_storages + number];
            total = live;
            break;
        case FETCH_START:
            transfer(e, number, p->fetch_channels[tier], p->fetch_ps[tier * p->num_storages + number]);
            e->clock_ps += p->fetch_drag_ps[tier * p->num_storages + number];
            arrive(e, number, &live);
            total = live;
            break;
        case FETCH_WAIT:
            wait_for(e, number, outcome);
            total = live;
            break;
        case SEND_WAIT:
            wait_for(e, number, outcome);
            total = leave(e, number, &live);
            break;
        case FREE:
            total = leave(e, number, &live);
            break;
        default: /* GIVE */
            total = live + p->handing_bytes[number];
            exceed(e, total, outcome);
        }
        if (outcome->peak_bytes < total)
            outcome->peak_bytes = total;
    }
    outcome->step_ps = e->clock_ps;
    for (int64_t channel = 0; channel < p->num_channels; channel++)
        if (outcome->step_ps < e->free_ps[channel])
            outcome->step_ps = e->free_ps[channel];
}
