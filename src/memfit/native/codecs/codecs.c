/* The door: choose the machine's table, cut the call into shares, run them on threads. */
#include "codecs.h"
#include "../team/team.h"

enum { LEAST_SHARE = 1 << 16 /* elements: below that a thread costs more than it does */ };

struct share {
    kernel *run;
    const struct job *job;
    int64_t begin, end, start, stop, result;
};

int memfit_codecs_have_avx2(void) {
#ifdef MEMFIT_HAS_AVX2_TABLE
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("popcnt");
#else
    return 0;
#endif
}

static void run_some(void *given, int64_t begin, int64_t end) {
    struct share *shares = given;
    for (int64_t i = begin; i < end; i++)
        shares[i].result = shares[i].run(shares[i].job, shares[i].begin, shares[i].end, shares[i].start, shares[i].stop);
}

static int64_t run_shares(struct share *shares, int num_shares) {
    memfit_share_out(run_some, shares, num_shares, 1, num_shares);
    int64_t total = 0;
    for (int i = 0; i < num_shares; i++)
        total += shares[i].result;
    return total;
}

/* Values that are packed one after the other go where the shares before have left off, so those are counted first.
 * numbers[1] is the capacity; more than that is not begun. */
static int64_t count_ahead(kernel *count, struct share *shares, int num_shares) {
    kernel *encode = shares[0].run;
    int64_t position = 0;
    for (int i = 0; i < num_shares; i++)
        shares[i].run = count;
    int64_t total = run_shares(shares, num_shares);
    for (int i = 0; i < num_shares; i++) {
        shares[i].run = encode;
        shares[i].start = position;
        position += shares[i].result;
        shares[i].stop = i + 1 < num_shares ? position : INT64_MAX;
    }
    return total;
}

int64_t memfit_codecs_run(int which, const struct job *job, int num_threads, int use_avx2) {
    kernel *const *kernels = memfit_plain_kernels;
#ifdef MEMFIT_HAS_AVX2_TABLE
    if (use_avx2 && memfit_codecs_have_avx2())
        kernels = memfit_avx2_kernels;
#endif
    int64_t grain = GRAIN, work = job->count;
    if (which == WINDOW_BACKWARD) { /* shared out by planes; the work is their windows */
        grain = 1;
        work *= job->numbers[1] * job->numbers[2] * job->numbers[3];
    }
    int64_t num_shares = least(least(num_threads, MAX_THREADS), work / LEAST_SHARE);
    if (num_shares < 2)
        return kernels[which](job, 0, job->count, 0, INT64_MAX);
    struct share shares[MAX_THREADS];
    int64_t length = ((job->count + num_shares - 1) / num_shares + grain - 1) / grain * grain;
    for (int i = 0; i < num_shares; i++)
        shares[i] = (struct share){kernels[which], job, least(i * length, job->count),
                                   least((i + 1) * length, job->count), 0, INT64_MAX, 0};
    if (which == SPARSE_ENCODE || which == CSR_ENCODE || which == SPARSE_FLOAT_ENCODE) {
        int count = which == SPARSE_FLOAT_ENCODE ? SPARSE_FLOAT_COUNT : SPARSE_COUNT;
        int64_t total = count_ahead(kernels[count], shares, (int)num_shares);
        if (total > job->numbers[1])
            return total;
    }
    return run_shares(shares, (int)num_shares);
}
