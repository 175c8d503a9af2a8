/* Kernels that do what some of torch's do on a CPU, to the bit, in less time: what every file here shares.
 *
 * Each says in which order torch adds, what it holds in double precision, and where it rounds: that is all there is to
 * keep. The caller sees to layouts. Whether the bits are torch's is asked of every machine, shape by shape
 * (memfit/capture/rewrites/stand_ins.py). */
#ifndef MEMFIT_KERNELS_H
#define MEMFIT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../team/team.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define MEMFIT_FOR_AVX2 1
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2,fma")))
#endif

/* Whether this machine has AVX2 and FMA, and nobody said to do without. */
int memfit_has_avx2(void);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
