/* Draw ones and zeros from torch's generator for CPUs, a Mersenne twister of 32 bits.
 *
 * For each element torch takes two numbers, the first for the upper half, and compares the lower 53 bits, as a fraction
 * of 2^53, with the probability. Fractions of that kind are exact, so that whole numbers can be compared instead. It
 * makes one number at a time; here a whole state's worth is made, and compared, at once. */
#include "kernels.h"

enum { STATE = 624, MIDDLE = 397 };

/* As torch lays it out in what get_state() gives, which has a field of 64 bits for each of 32. */
struct generator {
    uint64_t seed;
    int32_t left; /* how many there are until the state is made anew, and one */
    int32_t is_seeded;
    uint64_t next;
    uint64_t state[STATE];
};

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE uint32_t twisted(uint32_t far, uint32_t high, uint32_t low) {
    uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (mixed >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}

ALWAYS_INLINE void make_anew(uint32_t *state) {
    for (int k = 0; k < STATE - MIDDLE; k++)
        state[k] = twisted(state[k + MIDDLE], state[k], state[k + 1]);
    for (int k = STATE - MIDDLE; k < STATE - 1; k++)
        state[k] = twisted(state[k + MIDDLE - STATE], state[k], state[k + 1]);
    state[STATE - 1] = twisted(state[MIDDLE - 1], state[STATE - 1], state[0]);
}

ALWAYS_INLINE uint32_t tempered(uint32_t x) {
    x ^= x >> 11;
    x ^= (x << 7) & 0x9d2c5680u;
    x ^= (x << 15) & 0xefc60000u;
    return x ^ (x >> 18);
}

/* All elements; `state` has been made anew whenever it is at its end. */
ALWAYS_INLINE int draw(uint32_t *state, int next, float *out, int64_t count, uint64_t below) {
    int64_t i = 0;
    while (i < count) {
        if (next >= STATE) {
            make_anew(state);
            next = 0;
        }
        int num_pairs = (int)least((STATE - next) / 2, count - i);
        for (int k = 0; k < num_pairs; k++) {
            uint64_t high = tempered(state[next + 2 * k]), low = tempered(state[next + 2 * k + 1]);
            out[i + k] = ((high << 32 | low) & ((UINT64_C(1) << 53) - 1)) < below ? 1.0f : 0.0f;
        }
        i += num_pairs;
        next += 2 * num_pairs;
        if (i < count && STATE - next == 1) { /* a pair of which one half is in the next state */
            uint64_t high = tempered(state[next]);
            make_anew(state);
            out[i++] = ((high << 32 | tempered(state[0])) & ((UINT64_C(1) << 53) - 1)) < below ? 1.0f : 0.0f;
            next = 1;
        }
    }
    return next;
}

static int plain_draw(uint32_t *state, int next, float *out, int64_t count, uint64_t below) {
    return draw(state, next, out, count, below);
}

#ifdef MEMFIT_FOR_AVX2
WITH_AVX2 static int avx2_draw(uint32_t *state, int next, float *out, int64_t count, uint64_t below) {
    return draw(state, next, out, count, below);
}
#endif

void memfit_bernoulli(void *generator, float *out, int64_t count, uint64_t below) {
    struct generator *of = generator;
    uint32_t state[STATE];
    for (int k = 0; k < STATE; k++)
        state[k] = (uint32_t)of->state[k];
    int next = of->left == 1 ? STATE : (int)of->next; /* freshly seeded: the next number makes it anew */
#ifdef MEMFIT_FOR_AVX2
    if (memfit_has_avx2())
        next = avx2_draw(state, next, out, count, below);
    else
#endif
        next = plain_draw(state, next, out, count, below);
    for (int k = 0; k < STATE; k++)
        of->state[k] = state[k];
    of->next = (uint64_t)next;
    of->left = STATE + 1 - next;
}
