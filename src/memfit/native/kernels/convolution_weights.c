/* Gradients of the weights of convolutions, with windows of one element or of three by three.
 *
 * oneDNN first copies inputs and gradients into blocks of 16 channels. In between it goes through the elements of the
 * gradient, sample by sample, and adds the product of each with an element of the input to the sum of every weight that
 * joined the two; with some threads it does so in parts, which are then added up. With windows of one element, some
 * elements are added up from zero and then to what there is. Elements beyond an edge are left out. Here gradients are
 * turned, a few rows of some channels at a time, so that channels are vectors; the input is read as it is. */
#include <string.h>

#include "kernels.h"
#include "transposed.h"

enum { IN_CACHE = 1 << 15 /* floats of turned gradients */ };

/* How many vectors of channels of the result are done at once, and how many of the input. */
static int64_t width_of(const struct convolution_weights *of) { return (of->window == 1 ? 4 : 2) * LANES; }

static int64_t num_inputs(const struct convolution_weights *of) { return of->window == 1 ? 7 : 4; }

static int64_t num_taps(const struct convolution_weights *of) { return of->window * of->window; }

/* That one channel of the result has. */
static int64_t num_weights(const struct convolution_weights *of) { return of->in_channels * num_taps(of); }

static int64_t num_groups(const struct convolution_weights *of) {
    return (of->out_channels + width_of(of) - 1) / width_of(of);
}

/* What is turned at once: some rows, or so much of a row as is added up by itself. */
static int64_t num_turned(const struct convolution_weights *of) {
    if (of->window == 1)
        return least(of->num_summed, of->height * of->width);
    int64_t num_rows = IN_CACHE / (of->width * width_of(of));
    return least(num_rows < 1 ? 1 : num_rows, of->height) * of->width;
}

/* Of one part: those of the weights, by group of channels of the result; and of the bias. */
static int64_t num_sums(const struct convolution_weights *of) {
    return (num_weights(of) + 1) * num_groups(of) * width_of(of);
}

int64_t memfit_convolution_weights_scratch(const struct convolution_weights *of, int num_threads) {
    return of->num_parts * num_sums(of) + num_threads * num_turned(of) * width_of(of);
}

#ifdef MEMFIT_FOR_AVX2

/* Elements of a gradient, turned, and those of some channels of the input that they are multiplied by. */
struct stretch {
    const float *in, *grad_out;
    int64_t plane, num_rows, width;
    float *sums; /* of a channel, one row of the window */
    int64_t stride; /* from the sums of one channel to those of the next */
    int is_first, is_by_itself;
};

INLINE WITH_AVX512 void add_products(__m512 *sums, const float *in, const float *grad_out, int64_t plane, int num_inputs,
                                     int num_taps, int begin, int end, int num_vectors) {
    __m512 g[4];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++)
        g[v] = _mm512_loadu_ps(grad_out + v * LANES);
#pragma GCC unroll 7
    for (int c = 0; c < num_inputs; c++)
#pragma GCC unroll 3
        for (int tap = begin; tap < end; tap++) {
            __m512 x = _mm512_set1_ps(in[c * plane + tap]);
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) {
                int k = (c * num_taps + tap) * num_vectors + v;
                sums[k] = _mm512_fmadd_ps(x, g[v], sums[k]);
            }
        }
}

INLINE WITH_AVX512 void do_stretch(const struct stretch *of, int num_inputs, int num_taps, int num_vectors) {
    __m512 sums[28];
#pragma GCC unroll 7
    for (int c = 0; c < num_inputs; c++)
#pragma GCC unroll 12
        for (int k = 0; k < num_taps * num_vectors; k++)
            sums[c * num_taps * num_vectors + k] = of->is_first || of->is_by_itself
                                                       ? _mm512_setzero_ps()
                                                       : _mm512_loadu_ps(of->sums + c * of->stride + k * LANES);
    const float *in = of->in - (num_taps > 1), *grad_out = of->grad_out;
    for (int64_t row = 0; row < of->num_rows; row++) {
        int64_t x = 0, after = of->width;
        if (num_taps > 1) { /* the first and the last of a row have nothing on one side */
            add_products(sums, in, grad_out, of->plane, num_inputs, num_taps, 1, num_taps, num_vectors);
            in++, grad_out += num_vectors * LANES, x++, after--;
        }
        for (; x < after; x++, in++, grad_out += num_vectors * LANES)
            add_products(sums, in, grad_out, of->plane, num_inputs, num_taps, 0, num_taps, num_vectors);
        if (num_taps > 1) {
            add_products(sums, in, grad_out, of->plane, num_inputs, num_taps, 0, num_taps - 1, num_vectors);
            in++, grad_out += num_vectors * LANES;
        }
    }
#pragma GCC unroll 7
    for (int c = 0; c < num_inputs; c++)
#pragma GCC unroll 12
        for (int k = 0; k < num_taps * num_vectors; k++) {
            float *to = of->sums + c * of->stride + k * LANES;
            __m512 sum = sums[c * num_taps * num_vectors + k];
            _mm512_storeu_ps(to, of->is_by_itself && !of->is_first ? _mm512_add_ps(_mm512_loadu_ps(to), sum) : sum);
        }
}

#define STRETCH(inputs, taps, vectors)                                                                                 \
    WITH_AVX512 static void stretch_##inputs##_##taps(const struct stretch *of) {                                      \
        do_stretch(of, inputs, taps, vectors);                                                                         \
    }
STRETCH(1, 1, 4) STRETCH(2, 1, 4) STRETCH(3, 1, 4) STRETCH(4, 1, 4) STRETCH(5, 1, 4) STRETCH(6, 1, 4) STRETCH(7, 1, 4)
STRETCH(1, 3, 2) STRETCH(2, 3, 2) STRETCH(3, 3, 2) STRETCH(4, 3, 2)

typedef void stretch_kernel(const struct stretch *of);
static stretch_kernel *const of_points[] = {NULL,        stretch_1_1, stretch_2_1, stretch_3_1,
                                            stretch_4_1, stretch_5_1, stretch_6_1, stretch_7_1};
static stretch_kernel *const of_rows[] = {NULL, stretch_1_3, stretch_2_3, stretch_3_3, stretch_4_3};

/* What is turned at once, and the sums that it adds to. */
struct piece {
    const float *in, *turned; /* in: of the first channel of the sample */
    int64_t first, after; /* elements of a map */
    float *sums;
    int is_first;
};

/* What it adds to the sums of some channels of the input. */
static void do_piece(const struct convolution_weights *of, const struct piece *piece, int64_t begin, int64_t end) {
    int64_t size = of->height * of->width, width = width_of(of);
    for (int64_t c = begin; c < end; c += num_inputs(of)) {
        int64_t count = least(num_inputs(of), end - c);
        float *sums = piece->sums + c * num_taps(of) * width;
        struct stretch stretch = {piece->in + c * size, piece->turned, size, 1, of->width, sums, num_taps(of) * width,
                                  piece->is_first, of->window == 1};
        if (of->window == 1) {
            stretch.in += piece->first, stretch.width = piece->after - piece->first;
            of_points[count](&stretch);
            continue;
        }
        int64_t from = piece->first / of->width, until = piece->after / of->width;
        for (int64_t tap = 0; tap < 3; tap++) { /* a row of the window; rows that look beyond an edge are left out */
            int64_t top = tap == 0 && from == 0 ? 1 : from;
            int64_t bottom = tap == 2 && until == of->height ? until - 1 : until;
            stretch.in = piece->in + c * size + (top + tap - 1) * of->width;
            stretch.grad_out = piece->turned + (top - from) * of->width * width;
            stretch.num_rows = bottom - top;
            stretch.sums = sums + 3 * tap * width;
            of_rows[count](&stretch);
        }
    }
}

/* The same for the bias: nothing is multiplied. */
static void add_rows(const struct piece *piece, int64_t width, float *sums) {
    if (piece->is_first)
        memset(sums, 0, (size_t)width * sizeof(float));
    for (int64_t row = 0; row < piece->after - piece->first; row++)
        for (int64_t k = 0; k < width; k++)
            sums[k] += piece->turned[row * width + k];
}

/* One part of the samples, some channels of the input; the first of them see to the bias. */
WITH_AVX512 static void do_part(const struct convolution_weights *of, float *turned, int64_t part, int64_t begin,
                                int64_t end, int is_for_bias) {
    int64_t size = of->height * of->width, width = width_of(of), groups = num_groups(of);
    int64_t each = of->num_samples / of->num_parts, left = of->num_samples % of->num_parts;
    int64_t from = part * each + least(part, left), until = from + each + (part < left);
    float *sums = of->scratch + part * num_sums(of), *of_bias = sums + groups * num_weights(of) * width;
    for (int64_t sample = from; sample < until; sample++)
        for (int64_t first = 0; first < size; first += num_turned(of))
            for (int64_t group = 0; group < groups; group++) {
                struct piece piece = {of->in + sample * of->in_stride, turned, first,
                                      least(first + num_turned(of), size), sums + group * num_weights(of) * width,
                                      sample == from && first == 0};
                transpose(of->grad_out + sample * of->grad_stride + group * width * size + first, size,
                          least(width, of->out_channels - group * width), piece.after - first, turned, width, width);
                if (is_for_bias)
                    add_rows(&piece, width, of_bias + group * width);
                do_piece(of, &piece, begin, end);
            }
}

/* A part is done in one share, or, where there are fewer parts, in several: channels of the input each. */
static void do_share(const void *job, int64_t number, int64_t num_shares) {
    const struct convolution_weights *of = job;
    int64_t num_splits = num_shares < of->num_parts ? 1 : num_shares / of->num_parts, at_once = num_inputs(of);
    int64_t num_tiles = (of->in_channels + at_once - 1) / at_once;
    float *turned = of->scratch + of->num_parts * num_sums(of) + number * num_turned(of) * width_of(of);
    for (int64_t k = number; k < of->num_parts * num_splits; k += num_shares) {
        int64_t split = k % num_splits, begin = num_tiles * split / num_splits * at_once;
        int64_t end = least(num_tiles * (split + 1) / num_splits * at_once, of->in_channels);
        do_part(of, turned, k / num_splits, begin, end, of->grad_bias && split == 0);
    }
}

/* Add the parts up, and turn the sums of some channels of the result into weights. */
WITH_AVX512 static void finish(void *job, int64_t begin, int64_t end) {
    const struct convolution_weights *of = job;
    int64_t count = num_weights(of), width = width_of(of), groups = num_groups(of);
    for (int64_t group = begin; group < end; group++) {
        int64_t num_channels = least(width, of->out_channels - group * width);
        float *sums = of->scratch + group * count * width, *of_bias = of->scratch + (groups * count + group) * width;
        for (int64_t part = 1; part < of->num_parts; part++) {
            for (int64_t k = 0; k < count * width; k++)
                sums[k] += sums[part * num_sums(of) + k];
            for (int64_t k = 0; k < num_channels && of->grad_bias; k++)
                of_bias[k] += of_bias[part * num_sums(of) + k];
        }
        transpose(sums, width, count, num_channels, of->out + group * width * count, count, count);
        if (of->grad_bias)
            memcpy(of->grad_bias + group * width, of_bias, (size_t)num_channels * sizeof(float));
    }
}
#endif

void memfit_convolution_weights(const struct convolution_weights *of, int num_threads) {
#ifdef MEMFIT_FOR_AVX2
    memfit_do_shares(do_share, of, num_threads);
    memfit_share_out(finish, (void *)of, num_groups(of), 1, num_threads);
#else
    (void)of, (void)num_threads;
#endif
}
