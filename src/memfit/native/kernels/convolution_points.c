/* Convolutions with windows of one element, and the gradients of their inputs: products of matrices.
 *
 * oneDNN first copies maps into blocks of 16 channels, and its result back. In between it adds up, for each element of
 * the result, the products of some channels from zero, and adds that to what earlier channels have come to; how many
 * these are depends on the shape. Here the vectors are neighbours in a map, and samples follow each other without a gap:
 * what is left over of small maps is left over once. */
#include <string.h>

#include "kernels.h"
#include "transposed.h"

enum {
    WIDTH = 3 * LANES, /* elements at a time */
    OUTPUTS = 8, /* channels of the result at a time */
    IN_CACHE = 1 << 16, /* floats of copied maps */
    MOST_TILES = 8 /* that are copied at once */
};

static int64_t num_groups(const struct convolution *of) { return (of->out_channels + OUTPUTS - 1) / OUTPUTS; }

/* And the bias behind them. */
static int64_t packed_weights(const struct convolution *of) { return num_groups(of) * OUTPUTS * (of->in_channels + 1); }

static int64_t num_tiles_at_once(const struct convolution *of) {
    int64_t fitting = IN_CACHE / (of->in_channels * WIDTH);
    return fitting < 1 ? 1 : least(fitting, MOST_TILES);
}

static int64_t scratch_of_thread(const struct convolution *of) {
    return WIDTH * (num_tiles_at_once(of) * of->in_channels + num_groups(of) * OUTPUTS);
}

int64_t memfit_convolve_points_scratch(const struct convolution *of, int num_threads) {
    return packed_weights(of) + num_threads * scratch_of_thread(of);
}

#ifdef MEMFIT_FOR_AVX2

/* What some channels add to some channels of the result, whose rows are `stride` apart; sums begin at zero, or there. */
INLINE WITH_AVX512 void add_up(const float *in, const float *weight, const float *begin, int64_t num_channels, float *sums,
                               int64_t stride, int num_outputs, int is_first) {
    __m512 made[OUTPUTS][3];
#pragma GCC unroll 8
    for (int k = 0; k < OUTPUTS; k++)
        made[k][0] = made[k][1] = made[k][2] = begin ? _mm512_set1_ps(begin[k]) : _mm512_setzero_ps();
    for (int64_t c = 0; c < num_channels; c++, in += WIDTH, weight += OUTPUTS) {
        __m512 x[3] = {_mm512_loadu_ps(in), _mm512_loadu_ps(in + LANES), _mm512_loadu_ps(in + 2 * LANES)};
#pragma GCC unroll 8
        for (int k = 0; k < OUTPUTS; k++) {
            __m512 w = _mm512_set1_ps(weight[k]);
#pragma GCC unroll 3
            for (int part = 0; part < 3; part++)
                made[k][part] = _mm512_fmadd_ps(x[part], w, made[k][part]);
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < OUTPUTS; k++)
        if (k < num_outputs)
#pragma GCC unroll 3
            for (int part = 0; part < 3; part++) {
                float *to = sums + k * stride + part * LANES;
                _mm512_storeu_ps(to, is_first ? made[k][part] : _mm512_add_ps(_mm512_loadu_ps(to), made[k][part]));
            }
}

/* What all channels add up to, for some channels of the result. */
WITH_AVX512 static void do_group(const struct convolution *of, const float *in, int64_t group, float *sums, int64_t stride) {
    const float *weight = of->scratch + group * OUTPUTS * of->in_channels;
    const float *bias = of->scratch + packed_weights(of) + (group - num_groups(of)) * OUTPUTS;
    int num_outputs = (int)least(OUTPUTS, of->out_channels - group * OUTPUTS);
    for (int64_t c = 0; c < of->in_channels; c += of->num_summed)
        add_up(in + c * WIDTH, weight + c * OUTPUTS, c == 0 && of->bias ? bias : NULL,
               least(of->num_summed, of->in_channels - c), sums, stride, num_outputs, c == 0);
}

/* Elements that follow each other, sample by sample: as many as a tile has, or what is left. */
struct run {
    int64_t first, count;
};

static int is_whole(const struct convolution *of, struct run run) {
    int64_t size = of->height * of->width;
    return run.count == WIDTH && run.first % size + WIDTH <= size;
}

/* Where it begins in maps whose samples are so far apart. */
static int64_t place_of(const struct convolution *of, int64_t first, int64_t stride) {
    int64_t size = of->height * of->width;
    return first / size * stride + first % size;
}

/* How much of a run is in the sample it begins in. */
static int64_t in_sample(const struct convolution *of, struct run run) {
    int64_t size = of->height * of->width;
    return least(run.count, size - run.first % size);
}

/* Copy a run to rows of `WIDTH`, one for each channel. */
WITH_AVX512 static void fetch(const struct convolution *of, struct run run, float *rows) {
    int64_t size = of->height * of->width;
    if (is_whole(of, run)) {
        const float *from = of->in + place_of(of, run.first, of->in_stride);
        for (int64_t c = 0; c < of->in_channels; c++, from += size, rows += WIDTH)
#pragma GCC unroll 3
            for (int part = 0; part < 3; part++)
                _mm512_storeu_ps(rows + part * LANES, _mm512_loadu_ps(from + part * LANES));
        return;
    }
    while (run.count) {
        int64_t count = in_sample(of, run), at = place_of(of, run.first, of->in_stride);
        for (int64_t c = 0; c < of->in_channels; c++)
            memcpy(rows + c * WIDTH, of->in + at + c * size, (size_t)count * sizeof(float));
        run.first += count, run.count -= count, rows += count;
    }
}

/* Copy a run of the result from such rows. */
static void put(const struct convolution *of, struct run run, const float *rows) {
    int64_t size = of->height * of->width;
    while (run.count) {
        int64_t count = in_sample(of, run), at = place_of(of, run.first, of->out_channels * size);
        for (int64_t c = 0; c < of->out_channels; c++)
            memcpy(of->out + at + c * size, rows + c * WIDTH, (size_t)count * sizeof(float));
        run.first += count, run.count -= count, rows += count;
    }
}

static void do_tiles(const struct convolution *of, float *copy, int64_t begin, int64_t end) {
    int64_t size = of->height * of->width, length = WIDTH * of->in_channels, at_once = num_tiles_at_once(of);
    float *sums = copy + at_once * length;
    memset(copy, 0, (size_t)(at_once * length) * sizeof(float)); /* what the last one leaves over is a number */
    for (int64_t first = begin; first < end; first += at_once) {
        struct run runs[MOST_TILES];
        int64_t num_runs = least(at_once, end - first);
        for (int64_t k = 0; k < num_runs; k++) {
            int64_t at = (first + k) * WIDTH;
            runs[k] = (struct run){at, least(WIDTH, of->num_samples * size - at)};
            fetch(of, runs[k], copy + k * length);
        }
        for (int64_t group = 0; group < num_groups(of); group++)
            for (int64_t k = 0; k < num_runs; k++)
                if (is_whole(of, runs[k])) {
                    float *to = of->out + place_of(of, runs[k].first, of->out_channels * size) + group * OUTPUTS * size;
                    do_group(of, copy + k * length, group, to, size);
                }
        for (int64_t k = 0; k < num_runs; k++)
            if (!is_whole(of, runs[k])) {
                for (int64_t group = 0; group < num_groups(of); group++)
                    do_group(of, copy + k * length, group, sums + group * OUTPUTS * WIDTH, WIDTH);
                put(of, runs[k], sums);
            }
    }
}

static void do_share(const void *job, int64_t number, int64_t num_shares) {
    const struct convolution *of = job;
    int64_t num_tiles = (of->num_samples * of->height * of->width + WIDTH - 1) / WIDTH;
    do_tiles(of, of->scratch + packed_weights(of) + number * scratch_of_thread(of), num_tiles * number / num_shares,
             num_tiles * (number + 1) / num_shares);
}

/* By group of channels of the result: channels, channels of the group. */
WITH_AVX512 static void pack_weights(void *job, int64_t begin, int64_t end) {
    const struct convolution *of = job;
    for (int64_t group = begin; group < end; group++) {
        int64_t first = group * OUTPUTS, width = least(OUTPUTS, of->out_channels - first);
        float *to = of->scratch + group * of->in_channels * OUTPUTS;
        float *bias = of->scratch + packed_weights(of) + (group - num_groups(of)) * OUTPUTS;
        for (int64_t k = 0; k < OUTPUTS && of->bias; k++)
            bias[k] = k < width ? of->bias[first + k] : 0;
        if (!of->is_backward)
            transpose(of->weight + first * of->in_channels, of->in_channels, width, of->in_channels, to, OUTPUTS, OUTPUTS);
        else
            for (int64_t c = 0; c < of->in_channels; c++)
                for (int64_t k = 0; k < OUTPUTS; k++)
                    to[c * OUTPUTS + k] = k < width ? of->weight[c * of->out_channels + first + k] : 0;
    }
}
#endif

void memfit_convolve_points(const struct convolution *of, int num_threads) {
#ifdef MEMFIT_FOR_AVX2
    memfit_share_out(pack_weights, (void *)of, num_groups(of), 1, num_threads);
    memfit_do_shares(do_share, of, num_threads);
#else
    (void)of, (void)num_threads;
#endif
}
