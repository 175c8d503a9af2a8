/* Products of matrices one of which has few rows, as linear layers take them forward and backward.
 *
 * What such a product costs is to read the large matrix once, or to write it. MKL copies it into blocks first, as it
 * does where each element is used many times. Here it is read as it lies. MKL adds up the products of some terms from
 * zero, one after the other, and adds that to what earlier terms have come to, to zero at first: what is too small for a
 * float is a positive zero then. How many terms these are depends on the machine. */
#include <string.h>

#include "kernels.h"
#include "transposed.h"

enum {
    ROWS = 12, /* of the large matrix that are read side by side */
    TERMS = 2048, /* that are gone through before the next rows, or as many as are added up by themselves */
    STRIP = 16 * LANES, /* columns of the large matrix at a time */
    PAGE = 1024, /* floats */
    AHEAD = 128 /* floats that are fetched before it is their turn */
};

static int64_t num_groups(int64_t count) { return (count + LANES - 1) / LANES; }

/* The small matrix, column by column: of each column `LANES` rows side by side. */
static int64_t packed(const struct product *of) { return num_groups(of->num_rows) * LANES * of->num_terms; }

int64_t memfit_multiply_scratch(const struct product *of) {
    switch (of->kind) {
    case PRODUCT_WITH_ROWS:
        return packed(of) + num_groups(of->num_rows) * LANES * of->num_columns;
    case PRODUCT_WITH_COLUMNS:
        return packed(of);
    default:
        return 0;
    }
}

#ifdef MEMFIT_FOR_AVX2
WITH_AVX512 static void pack(void *job, int64_t begin, int64_t end) {
    const struct product *of = job;
    for (int64_t first = 0; first < of->num_rows; first += LANES)
        transpose(of->one + first * of->num_terms + begin, of->num_terms, least(LANES, of->num_rows - first), end - begin,
                  of->scratch + first * of->num_terms + begin * LANES, LANES, LANES);
}

/* Add what some terms come to, to the totals of a few rows of the large matrix with all of the small one's. */
INLINE WITH_AVX512 void add_rows(const struct product *of, const float *small, const float *large, int num_large,
                                 int64_t count, const float *bias, int is_first, float *totals) {
    __m512 total[ROWS];
#pragma GCC unroll 12
    for (int n = 0; n < num_large; n++)
        total[n] = is_first ? (bias ? _mm512_set1_ps(bias[n]) : _mm512_setzero_ps()) : _mm512_loadu_ps(totals + n * LANES);
    for (int64_t begin = 0; begin < count; begin += of->num_summed) {
        __m512 sum[ROWS];
#pragma GCC unroll 12
        for (int n = 0; n < num_large; n++)
            sum[n] = _mm512_setzero_ps();
        int64_t end = least(begin + of->num_summed, count);
        for (int64_t k = begin; k < end; k++) {
            if (k % LANES == 0)
#pragma GCC unroll 12
                for (int n = 0; n < num_large; n++)
                    _mm_prefetch((const char *)(large + n * of->num_terms + k + AHEAD), _MM_HINT_T0);
            __m512 x = _mm512_loadu_ps(small + k * LANES);
#pragma GCC unroll 12
            for (int n = 0; n < num_large; n++)
                sum[n] = _mm512_fmadd_ps(x, _mm512_set1_ps(large[n * of->num_terms + k]), sum[n]);
        }
#pragma GCC unroll 12
        for (int n = 0; n < num_large; n++)
            total[n] = _mm512_add_ps(total[n], sum[n]);
    }
#pragma GCC unroll 12
    for (int n = 0; n < num_large; n++)
        _mm512_storeu_ps(totals + n * LANES, total[n]);
}

WITH_AVX512 static void with_rows(void *job, int64_t begin, int64_t end) {
    const struct product *of = job;
    int64_t at_once = of->num_summed >= TERMS ? of->num_summed : TERMS / of->num_summed * of->num_summed;
    for (int64_t first = 0; first < of->num_rows; first += LANES) {
        const float *small = of->scratch + first * of->num_terms;
        float *totals = of->scratch + packed(of) + first * of->num_columns;
        for (int64_t k = 0; k < of->num_terms; k += at_once)
            for (int64_t n = begin, width; n < end; n += width) {
                const float *large = of->other + n * of->num_terms + k, *bias = of->bias ? of->bias + n : NULL;
                int64_t count = least(at_once, of->num_terms - k);
                width = end - n >= ROWS ? ROWS : end - n >= 4 ? 4 : 1;
                if (width == ROWS)
                    add_rows(of, small + k * LANES, large, ROWS, count, bias, k == 0, totals + n * LANES);
                else if (width == 4)
                    add_rows(of, small + k * LANES, large, 4, count, bias, k == 0, totals + n * LANES);
                else
                    add_rows(of, small + k * LANES, large, 1, count, bias, k == 0, totals + n * LANES);
            }
        for (int64_t m = 0; m < least(LANES, of->num_rows - first); m++)
            for (int64_t n = begin; n < end; n++)
                of->out[(first + m) * of->num_columns + n] = totals[n * LANES + m];
    }
}

/* Add what some terms come to, to some columns of the result: `LANES` of them, or as many as the mask says. On the way
 * lines are fetched that come later, one for each term. */
INLINE WITH_AVX512 void add_columns(const struct product *of, const float *small, const float *large, int64_t count,
                                    __mmask16 mask, const float *ahead, int64_t num_ahead, int64_t done, int64_t num_out,
                                    int is_first, float *out) {
    __m512 sum[LANES];
#pragma GCC unroll 16
    for (int m = 0; m < LANES; m++)
        sum[m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k++, done++) {
        if (done < num_ahead)
            _mm_prefetch((const char *)(ahead + done / LANES * of->num_columns + done % LANES * LANES), _MM_HINT_T1);
        __m512 w = _mm512_maskz_loadu_ps(mask, large + k * of->num_columns);
#pragma GCC unroll 16
        for (int m = 0; m < LANES; m++)
            sum[m] = _mm512_fmadd_ps(_mm512_set1_ps(small[k * LANES + m]), w, sum[m]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < LANES; m++)
        if (m < num_out) {
            float *to = out + m * of->num_columns;
            __m512 before = is_first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, to);
            _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sum[m]));
        }
}

WITH_AVX512 static void with_columns(void *job, int64_t begin, int64_t end) {
    const struct product *of = job;
    for (int64_t strip = begin; strip < end; strip += STRIP)
        for (int64_t first = 0; first < of->num_rows; first += LANES)
            for (int64_t k = 0; k < of->num_terms; k += of->num_summed) {
                int64_t count = least(of->num_summed, of->num_terms - k), width = least(STRIP, end - strip), done = 0;
                int64_t next = k + count < of->num_terms ? k + count : 0;
                const float *ahead = of->other + next * of->num_columns + (next ? strip : strip + STRIP);
                int64_t num_ahead = least(of->num_summed, of->num_terms - next) * LANES;
                for (int64_t j = 0; j < width; j += LANES, done += count) {
                    __mmask16 mask = first_lanes(width - j);
                    add_columns(of, of->scratch + first * of->num_terms + k * LANES,
                                of->other + k * of->num_columns + strip + j, count, mask, ahead, num_ahead, done,
                                least(LANES, of->num_rows - first), k == 0,
                                of->out + first * of->num_columns + strip + j);
                }
            }
}

/* Some rows of a large result, some columns: few terms each. */
INLINE WITH_AVX512 void make_rows(const struct product *of, int64_t n, int64_t j, int num_rows, int num_vectors,
                                  __mmask16 mask) {
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
            sum[i][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < of->num_terms; k++) {
        __m512 x[4];
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
            x[v] = _mm512_maskz_loadu_ps(mask, of->other + k * of->num_columns + j + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < num_rows; i++) {
            __m512 g = _mm512_set1_ps(of->one[k * of->num_rows + n + i]);
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++)
                sum[i][v] = _mm512_fmadd_ps(g, x[v], sum[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
            _mm512_mask_storeu_ps(of->out + (n + i) * of->num_columns + j + v * LANES, mask,
                                  _mm512_add_ps(_mm512_setzero_ps(), sum[i][v]));
}

/* A page of each row is written before the next page, so that what is read meanwhile stays in the cache. */
WITH_AVX512 static void of_few_terms(void *job, int64_t begin, int64_t end) {
    const struct product *of = job;
    for (int64_t page = 0; page < of->num_columns; page += PAGE) {
        int64_t last = least(page + PAGE, of->num_columns);
        for (int64_t n = begin, height; n < end; n += height) {
            int64_t j = page;
            height = end - n >= 4 ? 4 : 1;
            for (; j + 4 * LANES <= last; j += 4 * LANES)
                height == 4 ? make_rows(of, n, j, 4, 4, 0xffff) : make_rows(of, n, j, 1, 4, 0xffff);
            for (; j < last; j += LANES) {
                __mmask16 mask = first_lanes(last - j);
                height == 4 ? make_rows(of, n, j, 4, 1, mask) : make_rows(of, n, j, 1, 1, mask);
            }
        }
    }
}
#endif

void memfit_multiply(const struct product *of, int num_threads) {
#ifdef MEMFIT_FOR_AVX2
    if (of->kind == PRODUCT_OF_FEW_TERMS) {
        memfit_share_out(of_few_terms, (void *)of, of->num_rows, 4, num_threads);
        return;
    }
    memfit_share_out(pack, (void *)of, of->num_terms, 1, num_threads);
    if (of->kind == PRODUCT_WITH_ROWS)
        memfit_share_out(with_rows, (void *)of, of->num_columns, ROWS, num_threads);
    else
        memfit_share_out(with_columns, (void *)of, of->num_columns, STRIP, num_threads);
#else
    (void)of, (void)num_threads;
#endif
}
