/* Convolutions with windows of three by three, and the gradients of their inputs.
 *
 * oneDNN first copies maps into blocks of 16 channels, and its result back. What it does in between is to add up, for
 * each element of the result, the products of 16 channels from zero, row by row of the window, and to add that to what
 * earlier channels have come to. Elements that are not there, beyond an edge, it leaves out. Here the vectors are
 * channels of the result, too, but maps are read as they are: a few rows of 16 channels at a time, in the cache. */
#include <string.h>

#include "kernels.h"
#include "transposed.h"

enum {
    WIDTH = 2 * LANES, /* channels of the result at a time */
    POINTS = 14, /* of its elements */
    TAPS = 9,
    LEAST_ROWS = 2,
    IN_CACHE = 1 << 17 /* floats */
};

static int64_t num_groups(const struct convolution *of) { return (of->out_channels + WIDTH - 1) / WIDTH; }

static int64_t num_rows_at_once(const struct convolution *of) {
    int64_t num_rows = IN_CACHE / (of->width * (of->num_summed + num_groups(of) * WIDTH));
    return least(num_rows < LEAST_ROWS ? LEAST_ROWS : num_rows / 2 * 2, of->height);
}

static int64_t num_blocks(const struct convolution *of) {
    return (of->height + num_rows_at_once(of) - 1) / num_rows_at_once(of);
}

/* Planes of the copy: one row more on both sides, and never as far apart as a cache is wide. */
static int64_t plane_of(const struct convolution *of) { return (num_rows_at_once(of) + 2) * of->width | LANES; }

static int64_t scratch_of_thread(const struct convolution *of) {
    int64_t num_sums = num_rows_at_once(of) * of->width * num_groups(of) * WIDTH;
    return of->num_summed * plane_of(of) + num_sums;
}

/* And the bias behind them. */
static int64_t packed_weights(const struct convolution *of) {
    return num_groups(of) * (of->in_channels * TAPS + 1) * WIDTH;
}

int64_t memfit_convolve_windows_scratch(const struct convolution *of, int num_threads) {
    return packed_weights(of) + num_threads * scratch_of_thread(of);
}

#ifdef MEMFIT_FOR_AVX2

/* Some elements of the result, in one row or in two that follow each other, at the left edge, at the right one. */
struct tile {
    const float *in; /* the element in the middle of the first window */
    int64_t plane, width, num_channels;
    const float *weight;
    float *sums;
    int is_turned; /* taps are gone through from the other end */
    int has_above, has_below; /* rows of maps: above the first, below the last */
    const float *bias; /* of the channels of the result, for the first channels only; may be missing */
    int is_first;
};

INLINE WITH_AVX512 void add_up(__m512 sums[POINTS][2], const float *in, const struct tile *of, const float *weight,
                               int begin, int end, int first_row, int end_row, int num_points) {
    for (int64_t c = 0; c < of->num_channels; c++, in += of->plane, weight += TAPS * WIDTH) {
        __m512 low = _mm512_loadu_ps(weight), high = _mm512_loadu_ps(weight + LANES);
#pragma GCC unroll 2
        for (int row = first_row; row < end_row; row++)
#pragma GCC unroll 14
            for (int p = begin; p < end; p++) {
                __m512 x = _mm512_set1_ps(in[row * of->width + p]);
                int k = row * num_points + p;
                sums[k][0] = _mm512_fmadd_ps(x, low, sums[k][0]);
                sums[k][1] = _mm512_fmadd_ps(x, high, sums[k][1]);
            }
    }
}

INLINE WITH_AVX512 void add_up_row(__m512 sums[POINTS][2], const struct tile *of, int row, int first_row, int end_row,
                                   int num_points, int is_left, int is_right) {
    for (int k = 0; k < 3; k++) {
        int shift = of->is_turned ? 1 - k : k - 1;
        const float *in = of->in + (of->is_turned ? 1 - row : row - 1) * of->width + shift;
        const float *weight = of->weight + (3 * row + k) * WIDTH;
        if (shift < 0)
            add_up(sums, in, of, weight, is_left, num_points, first_row, end_row, num_points);
        else if (shift == 0)
            add_up(sums, in, of, weight, 0, num_points, first_row, end_row, num_points);
        else
            add_up(sums, in, of, weight, 0, num_points - is_right, first_row, end_row, num_points);
    }
}

INLINE WITH_AVX512 void do_tile(const struct tile *of, int num_rows, int num_points, int is_left, int is_right) {
    __m512 sums[POINTS][2];
#pragma GCC unroll 14
    for (int k = 0; k < num_rows * num_points; k++)
        sums[k][0] = sums[k][1] = _mm512_setzero_ps();
    for (int row = 0; row < 3; row++) {
        int shift = of->is_turned ? 1 - row : row - 1;
        int lacks_first = shift < 0 && !of->has_above, lacks_last = shift > 0 && !of->has_below;
        if (!lacks_first && !lacks_last)
            add_up_row(sums, of, row, 0, num_rows, num_points, is_left, is_right);
        else if (num_rows == 2 && lacks_first)
            add_up_row(sums, of, row, 1, 2, num_points, is_left, is_right);
        else if (num_rows == 2)
            add_up_row(sums, of, row, 0, 1, num_points, is_left, is_right);
    }
#pragma GCC unroll 14
    for (int k = 0; k < num_rows * num_points; k++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float *to = of->sums + k * WIDTH + half * LANES;
            const float *more = of->is_first ? of->bias + half * LANES : to;
            if (!of->is_first || of->bias)
                sums[k][half] = _mm512_add_ps(sums[k][half], _mm512_loadu_ps(more));
            _mm512_storeu_ps(to, sums[k][half]);
        }
}

typedef void tile_kernel(const struct tile *of);

#define TILE(n, left, right)                                                                                           \
    WITH_AVX512 static void tile_##n##_##left##right(const struct tile *of) { do_tile(of, 1, n, left, right); }
#define TILES(n) TILE(n, 0, 0) TILE(n, 0, 1) TILE(n, 1, 0) TILE(n, 1, 1)
#define TILE_OF_ROWS(n)                                                                                                \
    WITH_AVX512 static void rows_##n(const struct tile *of) { do_tile(of, 2, n, 1, 1); }                               \
    TILE(n, 1, 1)
TILE_OF_ROWS(2) TILE_OF_ROWS(3) TILE_OF_ROWS(4) TILE_OF_ROWS(5) TILE_OF_ROWS(6) TILE_OF_ROWS(7)
TILE(7, 0, 0) TILE(7, 0, 1) TILE(7, 1, 0)
TILES(8) TILES(9) TILES(10) TILES(11) TILES(12) TILES(13) TILES(14)

#define ROW_OF(n) {{tile_##n##_00, tile_##n##_01}, {tile_##n##_10, tile_##n##_11}}
/* By elements, whether the first is at the left edge, whether the last is at the right one. Rows that are longer than a
 * tile are cut into tiles of 7 at least. */
static tile_kernel *const in_row[POINTS + 1][2][2] = {
    [2] = {{0}, {0, tile_2_11}}, [3] = {{0}, {0, tile_3_11}}, [4] = {{0}, {0, tile_4_11}}, [5] = {{0}, {0, tile_5_11}},
    [6] = {{0}, {0, tile_6_11}}, [7] = ROW_OF(7),  [8] = ROW_OF(8),   [9] = ROW_OF(9),   [10] = ROW_OF(10),
    [11] = ROW_OF(11),           [12] = ROW_OF(12), [13] = ROW_OF(13), [14] = ROW_OF(14),
};
static tile_kernel *const in_two_rows[POINTS / 2 + 1] = {[2] = rows_2, rows_3, rows_4, rows_5, rows_6, rows_7};

/* Rows `begin` to `end` of what the channels in the cache give for some channels of the result. */
static void do_rows(const struct convolution *of, struct tile tile, int64_t begin, int64_t end) {
    const float *in = tile.in;
    float *sums = tile.sums;
    int64_t num_tiles = (of->width + POINTS - 1) / POINTS;
    for (int64_t row = begin; row < end;) {
        int is_pair = 2 * of->width <= POINTS && row + 1 < end;
        tile.has_above = row > 0;
        tile.has_below = row + is_pair + 1 < of->height;
        for (int64_t k = 0; k < num_tiles; k++) {
            int64_t first = of->width * k / num_tiles, after = of->width * (k + 1) / num_tiles;
            tile.in = in + (row - begin) * of->width + first;
            tile.sums = sums + ((row - begin) * of->width + first) * WIDTH;
            (is_pair ? in_two_rows[of->width] : in_row[after - first][k == 0][k == num_tiles - 1])(&tile);
        }
        row += 1 + is_pair;
    }
}

/* Blocks of rows, counted through all samples. */
WITH_AVX512 static void do_blocks(const struct convolution *of, float *copy, int64_t begin, int64_t end) {
    int64_t num_rows = num_rows_at_once(of), size = of->height * of->width, plane = plane_of(of);
    int64_t groups = num_groups(of);
    float *sums = copy + of->num_summed * plane;
    const float *bias = of->scratch + packed_weights(of) - groups * WIDTH;
    for (int64_t block = begin; block < end; block++) {
        int64_t sample = block / num_blocks(of), first = block % num_blocks(of) * num_rows;
        int64_t after = least(first + num_rows, of->height), above = first > 0, below = after < of->height;
        int64_t num_points = (after - first) * of->width;
        for (int64_t c = 0; c < of->in_channels; c += of->num_summed) {
            int64_t num_channels = least(of->num_summed, of->in_channels - c);
            for (int64_t k = 0; k < num_channels; k++)
                memcpy(copy + k * plane + (1 - above) * of->width,
                       of->in + sample * of->in_stride + (c + k) * size + (first - above) * of->width,
                       (size_t)((above + below) * of->width + num_points) * sizeof(float));
            for (int64_t group = 0; group < groups; group++) {
                struct tile tile = {copy + of->width, plane, of->width, num_channels,
                                    of->scratch + (group * of->in_channels + c) * TAPS * WIDTH,
                                    sums + group * num_rows * of->width * WIDTH, of->is_backward != 0, 0, 0,
                                    of->bias ? bias + group * WIDTH : NULL, c == 0};
                do_rows(of, tile, first, after);
            }
        }
        for (int64_t group = 0; group < groups; group++)
            transpose(sums + group * num_rows * of->width * WIDTH, WIDTH, num_points,
                      least(WIDTH, of->out_channels - group * WIDTH),
                      of->out + (sample * of->out_channels + group * WIDTH) * size + first * of->width, size, num_points);
    }
}

static void do_share(const void *job, int64_t number, int64_t num_shares) {
    const struct convolution *of = job;
    int64_t count = of->num_samples * num_blocks(of);
    do_blocks(of, of->scratch + packed_weights(of) + number * scratch_of_thread(of), count * number / num_shares,
              count * (number + 1) / num_shares);
}

/* By group of channels of the result: channels, taps, channels of the group. */
WITH_AVX512 static void pack_weights(void *job, int64_t begin, int64_t end) {
    const struct convolution *of = job;
    for (int64_t group = begin; group < end; group++) {
        int64_t first = group * WIDTH, width = least(WIDTH, of->out_channels - first);
        float *to = of->scratch + group * of->in_channels * TAPS * WIDTH;
        float *bias = of->scratch + packed_weights(of) + (group - num_groups(of)) * WIDTH;
        for (int64_t k = 0; k < WIDTH && of->bias; k++)
            bias[k] = k < width ? of->bias[first + k] : 0;
        if (!of->is_backward)
            transpose(of->weight + first * of->in_channels * TAPS, of->in_channels * TAPS, width, of->in_channels * TAPS,
                      to, WIDTH, WIDTH);
        else
            for (int64_t c = 0; c < of->in_channels; c++)
                transpose(of->weight + (c * of->out_channels + first) * TAPS, TAPS, width, TAPS, to + c * TAPS * WIDTH,
                          WIDTH, WIDTH);
    }
}
#endif

void memfit_convolve_windows(const struct convolution *of, int num_threads) {
#ifdef MEMFIT_FOR_AVX2
    memfit_share_out(pack_weights, (void *)of, num_groups(of), 1, num_threads);
    memfit_do_shares(do_share, of, num_threads);
#else
    (void)of, (void)num_threads;
#endif
}
