/* Max pooling of contiguous float32 maps, with the place of each maximum.
 *
 * torch goes through a window row by row and keeps what is larger than all before it, or is no number; if nothing is,
 * the first place stands. It does so for one window at a time, with a jump for each element; here eight windows that
 * lie side by side are gone through at once, in the same order. */
#include <math.h>

#include "kernels.h"

enum { WIDTH = 8 };

/* Of positions `start + k * dilation`, the first k that is not below 0, and the first that is not below `size`. */
static inline int64_t first_inside(int64_t start, int64_t dilation) {
    return start < 0 ? (-start + dilation - 1) / dilation : 0;
}

static inline int64_t first_beyond(int64_t start, int64_t dilation, int64_t size, int64_t count) {
    return start >= size ? 0 : least(count, (size - start + dilation - 1) / dilation);
}

static void pool_window(const struct max_pool *of, const float *plane, int64_t y, int64_t x, int64_t at) {
    int64_t row = y * of->stride_height - of->pad_height, column = x * of->stride_width - of->pad_width;
    int64_t rows = first_beyond(row, of->dilation_height, of->in_height, of->kernel_height);
    int64_t columns = first_beyond(column, of->dilation_width, of->in_width, of->kernel_width);
    int64_t top = first_inside(row, of->dilation_height), left = first_inside(column, of->dilation_width);
    int64_t found = (row + top * of->dilation_height) * of->in_width + column + left * of->dilation_width;
    float most = -INFINITY;
    for (int64_t i = top; i < rows; i++)
        for (int64_t j = left; j < columns; j++) {
            int64_t place = (row + i * of->dilation_height) * of->in_width + column + j * of->dilation_width;
            float value = plane[place];
            if (value > most || isnan(value)) {
                most = value;
                found = place;
            }
        }
    of->out[at] = most;
    of->indices[at] = found;
}

#ifdef MEMFIT_FOR_AVX2
/* Eight windows of which no column is outside the map. */
WITH_AVX2 static void pool_eight(const struct max_pool *of, const float *plane, int64_t y, int64_t x, int64_t at) {
    int64_t row = y * of->stride_height - of->pad_height, column = x * of->stride_width - of->pad_width;
    int64_t rows = first_beyond(row, of->dilation_height, of->in_height, of->kernel_height);
    int64_t top = first_inside(row, of->dilation_height);
    const __m256i apart = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                             _mm256_set1_epi32((int)of->stride_width));
    __m256 most = _mm256_set1_ps(-INFINITY);
    __m256i found = _mm256_add_epi32(
        apart, _mm256_set1_epi32((int)((row + top * of->dilation_height) * of->in_width + column)));
    for (int64_t i = top; i < rows; i++)
        for (int64_t j = 0; j < of->kernel_width; j++) {
            int64_t first = (row + i * of->dilation_height) * of->in_width + column + j * of->dilation_width;
            __m256i places = _mm256_add_epi32(apart, _mm256_set1_epi32((int)first));
            __m256 values = _mm256_i32gather_ps(plane, places, 4);
            __m256 is_taken = _mm256_or_ps(_mm256_cmp_ps(values, most, _CMP_GT_OQ),
                                           _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
            most = _mm256_blendv_ps(most, values, is_taken);
            found = _mm256_blendv_epi8(found, places, _mm256_castps_si256(is_taken));
        }
    _mm256_storeu_ps(of->out + at, most);
    _mm256_storeu_si256((__m256i *)(of->indices + at), _mm256_cvtepi32_epi64(_mm256_castsi256_si128(found)));
    _mm256_storeu_si256((__m256i *)(of->indices + at + 4), _mm256_cvtepi32_epi64(_mm256_extracti128_si256(found, 1)));
}
#endif

static void pool_planes(void *given, int64_t begin, int64_t end) {
    const struct max_pool *of = given;
    int64_t reach = (of->kernel_width - 1) * of->dilation_width; /* from a window's first column to its last */
    int has_avx2 = memfit_has_avx2();
    for (int64_t p = begin; p < end; p++) {
        const float *plane = of->in + p * of->in_height * of->in_width;
        for (int64_t y = 0; y < of->out_height; y++)
            for (int64_t x = 0; x < of->out_width;) {
                int64_t at = (p * of->out_height + y) * of->out_width + x;
#ifdef MEMFIT_FOR_AVX2
                int64_t column = x * of->stride_width - of->pad_width;
                if (has_avx2 && x + WIDTH <= of->out_width && column >= 0 &&
                    column + (WIDTH - 1) * of->stride_width + reach < of->in_width) {
                    pool_eight(of, plane, y, x, at);
                    x += WIDTH;
                    continue;
                }
#endif
                pool_window(of, plane, y, x++, at);
            }
    }
    (void)has_avx2, (void)reach;
}

void memfit_max_pool(const struct max_pool *of, int num_threads) {
    memfit_share_out(pool_planes, (void *)of, of->num_planes, 1, num_threads);
}
