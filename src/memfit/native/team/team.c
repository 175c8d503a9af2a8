/* Between two of its own ops torch's threads spin for a while on their cores, and new threads would have to share these
 * with them (benchmarks/stand_ins.py times both). So the work is given to torch's, by the one function that OpenMP
 * runtimes of all makers have for it. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "team.h"

static team *torch_team;

void memfit_use_team(team *of_torch) { torch_team = of_torch; }

struct shares {
    work *run;
    void *job;
    int64_t count, length, num_shares;
    atomic_int_fast64_t next;
};

/* Take shares until none is left: a team that is smaller than asked for does them all the same. */
static void take_shares(void *given) {
    struct shares *shares = given;
    for (;;) {
        int64_t begin = atomic_fetch_add(&shares->next, 1) * shares->length;
        int64_t end = begin + shares->length;
        if (begin >= shares->count)
            return;
        shares->run(shares->job, begin, end < shares->count ? end : shares->count);
    }
}

static void *take_shares_on_thread(void *given) {
    take_shares(given);
    return NULL;
}

static void take_shares_on_new_threads(struct shares *shares) {
    pthread_t threads[MAX_THREADS];
    int64_t num_running = 0;
    while (num_running < shares->num_shares - 1 &&
           pthread_create(&threads[num_running], NULL, take_shares_on_thread, shares) == 0)
        num_running++;
    take_shares(shares); /* all of them, where no thread could be had */
    while (num_running)
        pthread_join(threads[--num_running], NULL);
}

void memfit_share_out(work *run, void *job, int64_t count, int64_t grain, int num_threads) {
    int64_t num_grains = (count + grain - 1) / grain;
    int64_t num_shares = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    if (num_shares > num_grains)
        num_shares = num_grains;
    if (num_shares < 2) {
        run(job, 0, count);
        return;
    }
    struct shares shares = {run, job, count, (num_grains + num_shares - 1) / num_shares * grain, num_shares, 0};
    if (torch_team)
        torch_team(take_shares, &shares, (unsigned)num_shares, 0);
    else
        take_shares_on_new_threads(&shares);
}

struct numbered {
    share *run;
    const void *job;
    int64_t num_shares;
};

static void do_numbered(void *given, int64_t begin, int64_t end) {
    const struct numbered *of = given;
    for (int64_t number = begin; number < end; number++)
        of->run(of->job, number, of->num_shares);
}

void memfit_do_shares(share *run, const void *job, int num_shares) {
    struct numbered of = {run, job, num_shares};
    memfit_share_out(do_numbered, &of, num_shares, 1, num_shares);
}
