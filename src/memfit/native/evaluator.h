/* A problem, and room for evaluating it: what schedule.c, lives.c, lower.c, simulate.c and evaluate.c share. */

#ifndef MEMFIT_EVALUATOR_H
#define MEMFIT_EVALUATOR_H

#include <stdbool.h>
#include <stdint.h>

enum { DROP = 1, AWAY = 2 }; /* as in plan/problem.py */

enum { RUN, RERUN, FREE, GIVE, SEND_START, SEND_WAIT, FETCH_START, FETCH_WAIT, BOUNDARY }; /* as in plan/evaluate.py */

/* What became of a trial, as in plan/evaluate.py: it is evaluated; it does not beat what it was to beat; the program is
 * longer than there is room for. */
enum { EVALUATED = -1, NOT_BETTER = -2, OUTGROWN = -3 };

enum { SUM_SHARE = 50 }; /* as in plan/evaluate.py: how much less the sum of excesses counts than the largest */

/* Lists of numbers, one behind the other: list i is items[starts[i]] up to items[starts[i + 1]]. */
typedef struct {
    const int32_t *starts;
    const int32_t *items;
} Lists;

typedef struct {
    const int32_t *begin;
    const int32_t *end;
} Span;

/* plan/problem.py as arrays. Every field takes eight bytes, so that Python can mirror it without thought of padding. */
typedef struct {
    int64_t num_ops;
    int64_t num_forward;
    int64_t num_storages;
    int64_t num_tiers;
    int64_t num_channels;
    int64_t num_handings;
    int64_t num_tangents;
    int64_t num_choices;      /* ops that can be computed in several ways, one of which is to be chosen */
    int64_t max_length;       /* of a schedule */
    int64_t max_rerun_made;   /* storages that all re-runs of a schedule make, those that do not live on among them */
    Lists touches;            /* by op: the storages it uses, except those that stay: they have no end to be found */
    Lists rerun_touches;      /* by forward op: the same in the form it is re-run in, without those it makes */
    Lists source_touches;     /* by op: the storages it uses that a gradient is of */
    Lists rerun_source_touches;
    Lists makes;              /* by op: the storages that are new with it */
    Lists rerun_makes;        /* by forward op: the storages that are new when it is run again */
    Lists made;               /* by op: the storages of all its results, for the ledger */
    Lists writers;            /* by storage: the forward ops that make and write it; none if it is not the step's own */
    const int64_t *op_ps;
    const int64_t *rerun_ps;
    const int64_t *workspace_bytes;
    const int64_t *storage_bytes;
    const uint8_t *is_recomputable;
    const uint8_t *is_present;
    const int32_t *tangents;
    const int32_t *handing_storages;
    const int32_t *handing_ready_ops;
    const int32_t *handing_source_storages;
    const int32_t *handing_last_ops; /* the last op that uses that storage, re-runs aside */
    const int64_t *handing_bytes; /* by gradient: what autograd allocates to add it to its other parts */
    const int64_t *send_ps;   /* by tier, then by storage */
    const int64_t *fetch_ps;
    const int64_t *send_drag_ps; /* what compute loses to it */
    const int64_t *fetch_drag_ps;
    const int32_t *send_channels; /* by tier */
    const int32_t *fetch_channels;
    const int32_t *choice_ops;
    const int32_t *way_starts; /* by choice; ways are the fastest first, and each has less workspace than the last */
    const int64_t *way_ps;
    const int64_t *way_rerun_ps;
    const int64_t *way_workspace_bytes;
    const int32_t *first_ways; /* by choice: those before it are not taken; may change from one trial to the next */
} Problem;

typedef struct {
    int32_t kind;
    int32_t number; /* op, storage or gradient */
    int32_t tier;
} Instruction;

typedef struct {
    int64_t peak_bytes;
    int64_t step_ps;
    int64_t stall_ps;
    int64_t max_excess_bytes;
    int64_t sum_excess_bytes;
    int64_t num_reruns;
    int64_t num_instructions;
} Outcome;

/* How good a plan is: first how far it is above the budget, then how long it takes. */
typedef struct {
    int64_t violation_bytes;
    int64_t step_ps;
} Rank;

/* States to be evaluated, and what came of it. Eight bytes each again. */
typedef struct {
    const int32_t *states;
    int64_t limit_bytes;
    Rank incumbent;     /* only what is better than that matters */
    int64_t is_changed; /* the problem's arrays hold other numbers than last time; taken back when that is seen to */
    Outcome outcome;
} Trial;

/* A problem, and room for everything that one evaluation writes down. */
typedef struct {
    Problem problem;
    const int32_t *states;
    int64_t limit_bytes;
    Rank incumbent;

    /* What the problem says in other words; laid down once, and again when its arrays have changed. */
    int64_t base_bytes;
    int64_t tangent_bytes;
    int64_t least_ps;          /* every op once, by its fastest way */
    int64_t least_forward_ps;
    int32_t num_recomputable;
    int32_t *recomputable;     /* storages */
    int64_t *made_bytes;       /* by op */
    int64_t *rerun_made_bytes; /* by forward op */
    int64_t *least_op_ps;      /* by op: the fastest of its ways */
    int64_t *least_rerun_ps;
    int64_t *least_workspace_bytes;
    int32_t *choice_of;        /* by op; -1: it has none */

    /* Ways. The prices are those of the problem but for ops that have a choice. */
    int64_t *op_ps;
    int64_t *rerun_ps;
    int64_t *workspace_bytes;
    int64_t *room_bytes; /* by choice */
    int32_t *chosen;     /* by choice: which of its ways */
    int32_t *choice_positions; /* where ops run that have a choice */
    int32_t num_choice_positions;

    /* _Schedule. Its first num_forward positions are always the forward ops. */
    int32_t length;
    int32_t num_remade;
    int64_t num_rerun_made;
    int64_t compute_ps; /* all ops and re-runs; until ways are chosen, by the fastest */
    int64_t forward_ps; /* the same of the forward half; once ways are chosen */
    int32_t *ops;
    uint8_t *again;
    int32_t *remade_starts;
    int32_t *remade;
    int32_t *position; /* by op: where it runs for the first time */

    /* _recompute */
    uint8_t *missing; /* by storage: HERE, MISSING or WANTED; HERE for ever if it is not recomputable */
    int32_t *stack;
    uint64_t *burst; /* one bit per forward op; all clear between bursts */
    int32_t *passing; /* storages made again, but not to be held */
    int32_t num_passing;
    int32_t *last_touch; /* by storage that a gradient is of: the last re-run that uses it */

    /* _Lives */
    int64_t *needs;
    int64_t max_excess_bytes;   /* by what is needed while no transfer lingers */
    int64_t sum_excess_bytes;
    int32_t *given_at;          /* by storage */
    int32_t *gives_at;          /* by gradient; never descending, as gradients are given in order */
    uint8_t *in_use;            /* by storage */
    int32_t *first_use;         /* by storage that is away */
    int32_t *fetched_at;        /* by storage: the first use of one that was sent */
    int32_t *frees_starts;      /* by position; frees and sends are filled from the back. Re-runs' are sorted later */
    int32_t *frees;
    int32_t *sends_starts;
    int32_t *sends;
    int32_t *fetched_starts;
    int32_t *fetched;
    int32_t *due_starts;        /* the same where they are to be back before that; those of fetched if none is */
    int32_t *due;
    int32_t *sooner_starts;     /* room for these lists */
    int32_t *sooner;
    bool any_sooner;
    int32_t *frees_before_head; /* by position: a chain of storages, ascending */
    int32_t *frees_before_next;
    int32_t num_sent;

    /* _Emitter */
    int64_t clock_ps;
    int64_t *free_ps;     /* by channel */
    uint8_t *is_here;     /* by storage */
    int32_t *ended;
    int32_t *starts_head; /* by position: a chain of the fetches that start in front of it */
    int32_t *starts_next;
    Instruction *instructions;
    int32_t num_instructions;

    /* Transfers that linger: a queue per channel, in which ends never descend. */
    int32_t *queue_head; /* by channel */
    int32_t *queue_tail;
    int32_t *queue_next; /* by storage */
    int64_t *end_ps;     /* by storage */
    int32_t *started;    /* by storage: how many transfers started before it */
    int32_t *released;
    int32_t num_started;
    int32_t num_lingering;
    int64_t lingering_bytes;

    uint8_t *present; /* simulate: by storage */
} Evaluator;

enum { HERE, MISSING, WANTED };

static inline Span list(Lists lists, int64_t index)
{
    return (Span){lists.items + lists.starts[index], lists.items + lists.starts[index + 1]};
}

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

static inline void fill(int32_t *numbers, int64_t count, int32_t number)
{
    for (int64_t i = 0; i < count; i++)
        numbers[i] = number;
}

/* The storages that live on from the re-run at this position. */
static inline Span remade_at(const Evaluator *e, int32_t k)
{
    return list_of(e->remade_starts, e->remade, k);
}

/* What is used at this position for the first time since it was sent. */
static inline Span fetched_for(const Evaluator *e, int32_t k)
{
    return list_of(e->fetched_starts, e->fetched, k);
}

/* What is to be back by this position. */
static inline Span due_for(const Evaluator *e, int32_t k)
{
    return list_of(e->due_starts, e->due, k);
}

static inline int32_t tier_of(const Evaluator *e, int32_t storage)
{
    return (e->states[storage] - AWAY) % (int32_t)e->problem.num_tiers;
}

/* False if a plan that is at least this far above the budget, and takes at least so long, cannot be better. */
static inline bool may_improve(const Evaluator *e, int64_t violation_bytes, int64_t step_ps)
{
    if (violation_bytes != e->incumbent.violation_bytes)
        return violation_bytes < e->incumbent.violation_bytes;
    return step_ps < e->incumbent.step_ps;
}

static inline int64_t violation(int64_t max_excess_bytes, int64_t sum_excess_bytes)
{
    return max_excess_bytes + sum_excess_bytes / SUM_SHARE;
}

static inline void reset_transfers(Evaluator *e)
{
    e->clock_ps = 0;
    e->num_started = e->num_lingering = 0;
    e->lingering_bytes = 0;
    for (int64_t channel = 0; channel < e->problem.num_channels; channel++) {
        e->free_ps[channel] = 0;
        e->queue_head[channel] = -1;
    }
}

static inline void transfer(Evaluator *e, int32_t storage, int32_t channel, int64_t duration_ps)
{
    int64_t start_ps = e->clock_ps > e->free_ps[channel] ? e->clock_ps : e->free_ps[channel];
    e->free_ps[channel] = e->end_ps[storage] = start_ps + duration_ps;
}

/* Each of these says EVALUATED, or why there is no need or no room to go on. */

/* The ops in the order they run, re-runs among them. */
int64_t memfit_schedule(Evaluator *e);

/* The bytes at every position, what begins and ends there, and the ways in which ops are computed. */
int64_t memfit_lives(Evaluator *e);

/* All of that, and the instructions, into e->instructions. */
int64_t memfit_lower(Evaluator *e);

/* Run e->instructions on paper. */
void memfit_simulate(Evaluator *e, Outcome *outcome);

#endif
