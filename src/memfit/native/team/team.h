/* Share work out over threads: those that torch already has, else new ones. */
#ifndef MEMFIT_TEAM_H
#define MEMFIT_TEAM_H

#include <stdint.h>

enum { MAX_THREADS = 64 };

/* Work on the items [begin, end) of a job. */
typedef void work(void *job, int64_t begin, int64_t end);

/* How compilers call an OpenMP runtime: run `body(data)` on each of `num_threads` threads, this one included. */
typedef void team(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

/* The function of the runtime whose threads torch computes on; without one, new threads are made for each call. */
void memfit_use_team(team *of_torch);

/* Share `count` items out over threads, a multiple of `grain` items to each. */
void memfit_share_out(work *run, void *job, int64_t count, int64_t grain, int num_threads);

/* Work on one of `num_shares` shares of a job; each may have scratch of its own. */
typedef void share(const void *job, int64_t number, int64_t num_shares);

/* Do all shares, each on a thread as far as there are any. */
void memfit_do_shares(share *run, const void *job, int num_shares);

#endif
