/* Average pooling of contiguous float32 maps, and its backward where windows do not overlap.
 *
 * torch adds a window up from zero, row by row, divides the sum, and adds the quotient to a result that it has set to
 * zero: what is a negative zero by then becomes a positive one. It does so for one window at a time, with several
 * divisions of whole numbers to find out which; here eight windows that lie side by side are added up at once, in the
 * same order. Backward it sets the gradient of the input to zero and adds to each element the divided gradients of
 * its windows; where there is one window at most, an element can be written at once. */
#include <math.h>
#include <string.h>

#include "kernels.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { WIDTH = 8 };

/* The part of a window along one axis: positions of the map, and how many count if those around the map do too. */
struct span {
    int64_t from, until, length;
};

static inline struct span span_of(int64_t at, int64_t stride, int64_t pad, int64_t kernel, int64_t size) {
    int64_t from = at * stride - pad, until = least(from + kernel, size + pad), length = until - from;
    return (struct span){from < 0 ? 0 : from, least(until, size), length};
}

static inline struct span rows_of(const struct average_pool *of, int64_t y) {
    return span_of(y, of->stride_height, of->pad_height, of->kernel_height, of->in_height);
}

static inline struct span columns_of(const struct average_pool *of, int64_t x) {
    return span_of(x, of->stride_width, of->pad_width, of->kernel_width, of->in_width);
}

static inline float divisor_of(const struct average_pool *of, struct span rows, struct span columns) {
    if (of->divisor)
        return (float)of->divisor;
    if (of->counts_padding)
        return (float)(rows.length * columns.length);
    return (float)((rows.until - rows.from) * (columns.until - columns.from));
}

/* How many windows, from the first on, begin before the map does; and how many end within it. */
static inline int64_t num_before(const struct average_pool *of) {
    return least((of->pad_width + of->stride_width - 1) / of->stride_width, of->out_width);
}

static inline int64_t num_until(const struct average_pool *of) {
    int64_t room = of->in_width + of->pad_width - of->kernel_width;
    return room < 0 ? 0 : least(room / of->stride_width + 1, of->out_width);
}

static void pool_window(const struct average_pool *of, const float *plane, struct span rows, int64_t x, float *out) {
    struct span columns = columns_of(of, x);
    float sum = 0;
    for (int64_t i = rows.from; i < rows.until; i++)
        for (int64_t j = columns.from; j < columns.until; j++)
            sum += plane[i * of->in_width + j];
    *out = 0.0f + sum / divisor_of(of, rows, columns);
}

#ifdef MEMFIT_FOR_AVX2
/* All bits of the first `count` lanes; of none if it is negative. */
WITH_AVX2 static inline __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Up to eight windows of which no column is outside the map. No element is read that is in none of them. */
WITH_AVX2 ALWAYS_INLINE void pool_eight(const struct average_pool *of, const float *first, int64_t stride,
                                        int64_t num_rows, int64_t num_columns, int64_t count, float divisor,
                                        float *out) {
    __m256i lanes = first_lanes(count), lower = first_lanes(2 * count - 1), upper = first_lanes(2 * count - WIDTH);
    __m256i apart = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)stride));
    __m256 sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t j = 0; j < num_columns; j++) {
            const float *at = first + i * of->in_width + j;
            __m256 values;
            if (stride == 1)
                values = _mm256_maskload_ps(at, lanes);
            else if (stride == 2) /* of windows 0, 1, 4, 5, 2, 3, 6, 7 */
                values = _mm256_shuffle_ps(_mm256_maskload_ps(at, lower), _mm256_maskload_ps(at + WIDTH - 1, upper),
                                           _MM_SHUFFLE(3, 1, 2, 0));
            else
                values = _mm256_mask_i32gather_ps(_mm256_setzero_ps(), at, apart, _mm256_castsi256_ps(lanes), 4);
            sum = _mm256_add_ps(sum, values);
        }
    if (stride == 2)
        sum = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sum), _MM_SHUFFLE(3, 1, 2, 0)));
    __m256 quotient = _mm256_add_ps(_mm256_setzero_ps(), _mm256_div_ps(sum, _mm256_set1_ps(divisor)));
    if (count == WIDTH)
        _mm256_storeu_ps(out, quotient);
    else
        _mm256_maskstore_ps(out, lanes, quotient);
}

/* Windows that lie side by side and of which no column is outside the map, with code of its own for the usual ones. */
WITH_AVX2 static void pool_many(const struct average_pool *of, const float *plane, struct span rows, int64_t x,
                                int64_t end, float *out) {
    struct span columns = columns_of(of, x);
    int64_t num_rows = rows.until - rows.from, num_columns = of->kernel_width, stride = of->stride_width;
    const float *first = plane + rows.from * of->in_width + columns.from;
    float divisor = divisor_of(of, rows, columns);
    for (int64_t k = 0; k < end - x; k += WIDTH) {
        int64_t count = least(end - x - k, WIDTH);
        if (stride == 2 && num_rows == 2 && num_columns == 2)
            pool_eight(of, first + k * 2, 2, 2, 2, count, divisor, out + k);
        else if (stride == 1)
            pool_eight(of, first + k, 1, num_rows, num_columns, count, divisor, out + k);
        else if (stride == 2)
            pool_eight(of, first + k * 2, 2, num_rows, num_columns, count, divisor, out + k);
        else
            pool_eight(of, first + k * stride, stride, num_rows, num_columns, count, divisor, out + k);
    }
}
#endif

static void pool_planes(void *given, int64_t begin, int64_t end) {
    const struct average_pool *of = given;
    int64_t inside = num_before(of), beyond = memfit_has_avx2() ? num_until(of) : 0;
    for (int64_t p = begin; p < end; p++)
        for (int64_t y = 0; y < of->out_height; y++) {
            const float *plane = of->in + p * of->in_height * of->in_width;
            float *out = of->out + (p * of->out_height + y) * of->out_width;
            struct span rows = rows_of(of, y);
            for (int64_t x = 0; x < of->out_width;) {
#ifdef MEMFIT_FOR_AVX2
                if (x >= inside && x < beyond) {
                    pool_many(of, plane, rows, x, beyond, out + x);
                    x = beyond;
                    continue;
                }
#endif
                pool_window(of, plane, rows, x, out + x);
                x++;
            }
        }
    (void)inside, (void)beyond;
}

void memfit_average_pool(const struct average_pool *of, int num_threads) {
    memfit_share_out(pool_planes, (void *)of, of->num_planes, 1, num_threads);
}

static inline void fill_with(float *out, int64_t from, int64_t until, float value) {
    for (int64_t j = from; j < until; j++)
        out[j] = value;
}

#ifdef MEMFIT_FOR_AVX2
/* Up to eight windows of two columns, side by side. */
WITH_AVX2 static void spread_eight(const float *grad, int64_t count, float divisor, float *out) {
    __m256 value = _mm256_div_ps(_mm256_maskload_ps(grad, first_lanes(count)), _mm256_set1_ps(divisor));
    value = _mm256_add_ps(_mm256_setzero_ps(), value);
    __m256 even = _mm256_unpacklo_ps(value, value), odd = _mm256_unpackhi_ps(value, value); /* 0, 1, 4, 5; 2, 3, 6, 7 */
    __m256 lower = _mm256_permute2f128_ps(even, odd, 0x20), upper = _mm256_permute2f128_ps(even, odd, 0x31);
    if (count == WIDTH) {
        _mm256_storeu_ps(out, lower);
        _mm256_storeu_ps(out + WIDTH, upper);
    } else {
        _mm256_maskstore_ps(out, first_lanes(2 * count), lower);
        _mm256_maskstore_ps(out + WIDTH, first_lanes(2 * count - WIDTH), upper);
    }
}
#endif

/* One row of the input's gradient, from one row of windows. */
static void spread_row(const struct average_pool *of, const float *grad, struct span rows, int has_avx2, float *out) {
    int64_t x = 0, done = 0;
#ifdef MEMFIT_FOR_AVX2
    if (has_avx2 && of->kernel_width == 2 && of->stride_width == 2 && of->pad_width == 0) {
        int64_t count, whole = num_until(of);
        for (; x < whole; x += count) {
            count = least(whole - x, WIDTH);
            spread_eight(grad + x, count, divisor_of(of, rows, columns_of(of, x)), out + 2 * x);
        }
        done = 2 * whole;
    }
#endif
    for (; x < of->out_width; x++) {
        struct span columns = columns_of(of, x);
        fill_with(out, done, columns.from, 0);
        fill_with(out, columns.from, columns.until, 0.0f + grad[x] / divisor_of(of, rows, columns));
        done = columns.until;
    }
    fill_with(out, done, of->in_width, 0);
    (void)has_avx2;
}

static void spread_planes(void *given, int64_t begin, int64_t end) {
    const struct average_pool *of = given;
    int has_avx2 = memfit_has_avx2();
    size_t row_size = (size_t)of->in_width * sizeof(float);
    for (int64_t p = begin; p < end; p++) {
        float *plane = of->out + p * of->in_height * of->in_width;
        int64_t done = 0;
        for (int64_t y = 0; y < of->out_height; y++) {
            struct span rows = rows_of(of, y);
            fill_with(plane, done * of->in_width, rows.from * of->in_width, 0);
            float *first = plane + rows.from * of->in_width;
            spread_row(of, of->in + (p * of->out_height + y) * of->out_width, rows, has_avx2, first);
            for (int64_t i = rows.from + 1; i < rows.until; i++)
                memcpy(plane + i * of->in_width, first, row_size);
            done = rows.until;
        }
        fill_with(plane, done * of->in_width, of->in_height * of->in_width, 0);
    }
}

void memfit_average_pool_backward(const struct average_pool *of, int num_threads) {
    memfit_share_out(spread_planes, (void *)of, of->num_planes, 1, num_threads);
}
