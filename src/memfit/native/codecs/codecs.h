/* Codec kernels: what every file here shares.
 *
 * Each body (mask_body.h, ...) is compiled twice, for any machine (plain.c) and for AVX2 (avx2.c), into two tables of
 * the same functions; codecs.c picks a table when it is called and shares a call out over threads. Pointers need no
 * alignment. Codes are little-endian, as the machines are that torch runs on; the references are the torch twins in
 * memfit/codecs. */
#ifndef MEMFIT_CODECS_H
#define MEMFIT_CODECS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define MEMFIT_HAS_AVX2_TABLE 1
#endif

enum {
    GRAIN = 768, /* a thread's share is a multiple: no two write to one byte, and blocks of 256 and of 24 stay whole */
    BLOCK = 256, /* elements to one scale, one offset, one row */
};

/* One call. What `in2`, `numbers` and `reals` are, each kernel says. */
struct job {
    const void *in;
    const void *in2;
    void *out;
    int64_t count; /* elements of the tensor; for window_backward its planes */
    const int64_t *numbers;
    const float *reals;
};

/* Work on elements [begin, end). For kernels that pack values one after the other these go to [start, stop).
 * Returns 0, or how many elements (or at least one) could not be encoded; counting kernels return their count. */
typedef int64_t kernel(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop);

enum which {
    MASK_PACK,
    MASK_PACK_BOOL,
    MASK_UNPACK,
    MASK_GATE,
    WINDOW_PACK,
    WINDOW_UNPACK,
    SPARSE_COUNT,
    SPARSE_ENCODE,
    SPARSE_DECODE,
    CSR_ENCODE,
    CSR_DECODE,
    FP16_ENCODE,
    FP16_DECODE,
    BF16_ENCODE,
    BF16_DECODE,
    FP10_ENCODE,
    FP10_DECODE,
    FP8_ENCODE,
    FP8_DECODE,
    INT8_ENCODE,
    INT8_DECODE,
    INT4_ENCODE,
    INT4_DECODE,
    NARROW_ENCODE,
    NARROW_DECODE,
    WINDOW_BACKWARD,
    SPARSE_FLOAT_COUNT,
    SPARSE_FLOAT_ENCODE,
    SPARSE_FLOAT_DECODE,
    NUM_KERNELS
};

extern kernel *const memfit_plain_kernels[NUM_KERNELS];
#ifdef MEMFIT_HAS_AVX2_TABLE
extern kernel *const memfit_avx2_kernels[NUM_KERNELS];
#endif

int memfit_codecs_have_avx2(void);
int64_t memfit_codecs_run(int which, const struct job *job, int num_threads, int use_avx2);

/* Loads and stores that do not care where they point: compilers make one instruction of them. */
static inline uint16_t load16(const void *at) { uint16_t x; memcpy(&x, at, sizeof x); return x; }
static inline uint32_t load32(const void *at) { uint32_t x; memcpy(&x, at, sizeof x); return x; }
static inline uint64_t load64(const void *at) { uint64_t x; memcpy(&x, at, sizeof x); return x; }
static inline float load_float(const void *at) { float x; memcpy(&x, at, sizeof x); return x; }
static inline void store16(void *at, uint16_t x) { memcpy(at, &x, sizeof x); }
static inline void store32(void *at, uint32_t x) { memcpy(at, &x, sizeof x); }
static inline void store64(void *at, uint64_t x) { memcpy(at, &x, sizeof x); }
static inline void store_float(void *at, float x) { memcpy(at, &x, sizeof x); }
static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, sizeof b); return b; }
static inline float float_of(uint32_t b) { float x; memcpy(&x, &b, sizeof x); return x; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
