/* Training-mode batch norm of float32 maps whose channels are last in memory, and its backward: rows of channels.
 *
 * torch shares the rows out over its threads, each of which adds up its part in single precision; the parts are then
 * added up in double. It goes through all rows three times, and in backward it divides twice for each element, always
 * the same numbers. Here a few channels at a time are gone through, so that they are still in the cache the next time,
 * and threads have channels of their own; the parts are kept apart all the same, as that is what bits depend on. */
#include <math.h>

#include "kernels.h"

enum { WIDTH = 8, BLOCK = 4 * WIDTH /* channels at a time */, AHEAD = 16 /* rows that are fetched before their turn */ };

struct rows {
    const float *in, *grad; /* without a gradient, what is added up is that of the forward pass */
    int64_t count, stride;
};

static struct rows part_of(const float *in, const float *grad, int64_t num_rows, int64_t stride, int64_t num_parts,
                           int64_t part) {
    int64_t length = (num_rows + num_parts - 1) / num_parts;
    int64_t begin = least(part * length, num_rows), end = least(begin + length, num_rows);
    return (struct rows){in + begin * stride, grad ? grad + begin * stride : NULL, end - begin, stride};
}

/* Add up some channels over a part's rows: elements, squared distances from the means if there are any; with a
 * gradient, that and its products with the distances. */
static void plain_sums(struct rows of, int64_t width, const float *means, float *sums, float *products) {
    for (int64_t c = 0; c < width; c++)
        sums[c] = products[c] = 0;
    for (int64_t r = 0; r < of.count; r++)
        for (int64_t c = 0; c < width; c++) {
            float x = of.in[r * of.stride + c], distance = means ? x - means[c] : 0;
            if (of.grad) {
                sums[c] += of.grad[r * of.stride + c];
                products[c] = fmaf(distance, of.grad[r * of.stride + c], products[c]);
            } else
                sums[c] = means ? fmaf(distance, distance, sums[c]) : x + sums[c];
        }
}

/* Lines through some channels: what their elements are multiplied by, what is added, what they are not to be below. */
struct lines {
    float alpha[BLOCK], beta[BLOCK], lowest;
};

static void plain_scale(struct rows of, int64_t width, const struct lines *by, float *out) {
    for (int64_t r = 0; r < of.count; r++)
        for (int64_t c = 0; c < width; c++)
            out[r * of.stride + c] = no_less(fmaf(of.in[r * of.stride + c], by->alpha[c], by->beta[c]), by->lowest);
}

/* What each element's gradient is made of, channel by channel. */
struct slopes {
    float mean[BLOCK], k[BLOCK], grad_mean[BLOCK], invstd[BLOCK], weight[BLOCK];
};

static void plain_slope(struct rows of, int64_t width, const struct slopes *by, float *out) {
    for (int64_t r = 0; r < of.count; r++)
        for (int64_t c = 0; c < width; c++) {
            int64_t at = r * of.stride + c;
            float rest = fmaf(-(of.in[at] - by->mean[c]), by->k[c], of.grad[at] - by->grad_mean[c]);
            out[at] = rest * by->invstd[c] * by->weight[c];
        }
}

#ifdef MEMFIT_FOR_AVX2
#define INLINE static inline __attribute__((always_inline))

INLINE WITH_AVX2 void sum_vectors(struct rows of, int num_vectors, const float *means, float *sums, float *products) {
    __m256 sum[4], product[4], mean[4];
    for (int v = 0; v < num_vectors; v++) {
        sum[v] = product[v] = _mm256_setzero_ps();
        mean[v] = means ? _mm256_loadu_ps(means + v * WIDTH) : _mm256_setzero_ps();
    }
    for (int64_t r = 0; r < of.count; r++) {
        for (int v = 0; v < num_vectors; v += 2) {
            __builtin_prefetch(of.in + (r + AHEAD) * of.stride + v * WIDTH);
            if (of.grad)
                __builtin_prefetch(of.grad + (r + AHEAD) * of.stride + v * WIDTH);
        }
        for (int v = 0; v < num_vectors; v++) {
            __m256 x = _mm256_loadu_ps(of.in + r * of.stride + v * WIDTH), distance = _mm256_sub_ps(x, mean[v]);
            if (of.grad) {
                __m256 grad = _mm256_loadu_ps(of.grad + r * of.stride + v * WIDTH);
                sum[v] = _mm256_add_ps(sum[v], grad);
                product[v] = _mm256_fmadd_ps(distance, grad, product[v]);
            } else
                sum[v] = means ? _mm256_fmadd_ps(distance, distance, sum[v]) : _mm256_add_ps(x, sum[v]);
        }
    }
    for (int v = 0; v < num_vectors; v++) {
        _mm256_storeu_ps(sums + v * WIDTH, sum[v]);
        _mm256_storeu_ps(products + v * WIDTH, product[v]);
    }
}

INLINE WITH_AVX2 void scale_vectors(struct rows of, int num_vectors, const struct lines *by, float *out) {
    __m256 alpha[4], beta[4], lowest = _mm256_set1_ps(by->lowest);
    for (int v = 0; v < num_vectors; v++) {
        alpha[v] = _mm256_loadu_ps(by->alpha + v * WIDTH);
        beta[v] = _mm256_loadu_ps(by->beta + v * WIDTH);
    }
    for (int64_t r = 0; r < of.count; r++) {
        for (int v = 0; v < num_vectors; v += 2)
            __builtin_prefetch(out + (r + AHEAD) * of.stride + v * WIDTH, 1);
        for (int v = 0; v < num_vectors; v++) {
            int64_t at = r * of.stride + v * WIDTH;
            __m256 made = _mm256_fmadd_ps(_mm256_loadu_ps(of.in + at), alpha[v], beta[v]);
            _mm256_storeu_ps(out + at, _mm256_max_ps(lowest, made));
        }
    }
}

INLINE WITH_AVX2 void slope_vectors(struct rows of, int num_vectors, const struct slopes *by, float *out) {
    for (int64_t r = 0; r < of.count; r++) {
        for (int v = 0; v < num_vectors; v += 2)
            __builtin_prefetch(out + (r + AHEAD) * of.stride + v * WIDTH, 1);
        for (int v = 0; v < num_vectors; v++) {
            int64_t at = r * of.stride + v * WIDTH, c = v * WIDTH;
            __m256 distance = _mm256_sub_ps(_mm256_loadu_ps(of.in + at), _mm256_loadu_ps(by->mean + c));
            __m256 rest = _mm256_sub_ps(_mm256_loadu_ps(of.grad + at), _mm256_loadu_ps(by->grad_mean + c));
            rest = _mm256_fnmadd_ps(distance, _mm256_loadu_ps(by->k + c), rest);
            rest = _mm256_mul_ps(rest, _mm256_loadu_ps(by->invstd + c));
            _mm256_storeu_ps(out + at, _mm256_mul_ps(rest, _mm256_loadu_ps(by->weight + c)));
        }
    }
}

/* Each for a whole block of channels or a vector of them: of a number that is known the loops above are unrolled. */
WITH_AVX2 static void avx2_sums(struct rows of, int64_t width, const float *means, float *sums, float *products) {
    if (of.grad)
        width == BLOCK ? sum_vectors(of, 4, means, sums, products) : sum_vectors(of, 1, means, sums, products);
    else if (means)
        width == BLOCK ? sum_vectors(of, 4, means, sums, products) : sum_vectors(of, 1, means, sums, products);
    else
        width == BLOCK ? sum_vectors(of, 4, NULL, sums, products) : sum_vectors(of, 1, NULL, sums, products);
}

WITH_AVX2 static void avx2_scale(struct rows of, int64_t width, const struct lines *by, float *out) {
    width == BLOCK ? scale_vectors(of, 4, by, out) : scale_vectors(of, 1, by, out);
}

WITH_AVX2 static void avx2_slope(struct rows of, int64_t width, const struct slopes *by, float *out) {
    width == BLOCK ? slope_vectors(of, 4, by, out) : slope_vectors(of, 1, by, out);
}
#endif

/* How many channels from one on are gone through at a time, and whether as vectors. */
static int64_t width_of(int64_t num_left, int *are_vectors) {
    *are_vectors = memfit_has_avx2() && num_left >= WIDTH;
    return num_left >= BLOCK ? BLOCK : *are_vectors ? WIDTH : least(num_left, WIDTH);
}

static void add_up(struct rows of, int64_t width, int are_vectors, const float *means, float *sums, float *products) {
#ifdef MEMFIT_FOR_AVX2
    if (are_vectors) {
        avx2_sums(of, width, means, sums, products);
        return;
    }
#endif
    plain_sums(of, width, means, sums, products);
}

static void scale_rows(const struct batch_norm *of, int64_t channel, int64_t width, int are_vectors) {
    struct rows rows = part_of(of->in + channel, NULL, of->num_samples * of->image_size, of->num_channels, 1, 0);
    struct lines by = {.lowest = lowest_of(of)};
    for (int64_t c = 0; c < width; c++)
        memfit_line_of(of, channel + c, &by.alpha[c], &by.beta[c]);
#ifdef MEMFIT_FOR_AVX2
    if (are_vectors) {
        avx2_scale(rows, width, &by, of->out + channel);
        return;
    }
#endif
    plain_scale(rows, width, &by, of->out + channel);
}

static void normalise_rows(void *given, int64_t begin, int64_t end) {
    const struct batch_norm *of = given;
    int64_t num_rows = of->num_samples * of->image_size, stride = of->num_channels, width;
    for (int64_t channel = begin; channel < end; channel += width) {
        int are_vectors;
        width = width_of(end - channel, &are_vectors);
        float means[BLOCK], sums[BLOCK], unused[BLOCK];
        for (int is_var = 0; is_var < 2; is_var++) {
            double totals[BLOCK] = {0};
            for (int64_t part = 0; part < of->num_parts; part++) {
                struct rows rows = part_of(of->in + channel, NULL, num_rows, stride, of->num_parts, part);
                add_up(rows, width, are_vectors, is_var ? means : NULL, sums, unused);
                for (int64_t c = 0; c < width; c++)
                    totals[c] += sums[c];
            }
            for (int64_t c = 0; c < width; c++) {
                if (is_var)
                    memfit_finish_channel(of, channel + c, means[c], totals[c]);
                else
                    means[c] = (float)(totals[c] / (double)num_rows);
            }
        }
        scale_rows(of, channel, width, are_vectors);
    }
}

static void renormalise_rows(void *given, int64_t begin, int64_t end) {
    int64_t width;
    for (int64_t channel = begin; channel < end; channel += width) {
        int are_vectors;
        width = width_of(end - channel, &are_vectors);
        scale_rows(given, channel, width, are_vectors);
    }
}

static void slope_rows(void *given, int64_t begin, int64_t end) {
    const struct batch_norm_backward *of = given;
    int64_t stride = of->num_channels, width;
    float num_rows = (float)of->num_rows;
    for (int64_t channel = begin; channel < end; channel += width) {
        int are_vectors;
        width = width_of(end - channel, &are_vectors);
        float sums[BLOCK], products[BLOCK];
        double total_sums[BLOCK] = {0}, total_products[BLOCK] = {0};
        for (int64_t part = 0; part < of->num_parts; part++) {
            struct rows rows =
                part_of(of->in + channel, of->grad_out + channel, of->num_rows, stride, of->num_parts, part);
            add_up(rows, width, are_vectors, of->mean + channel, sums, products);
            for (int64_t c = 0; c < width; c++) {
                total_sums[c] += sums[c];
                total_products[c] += products[c];
            }
        }
        struct slopes by;
        for (int64_t c = 0; c < width; c++) {
            float sum = (float)total_sums[c], product = (float)total_products[c], invstd = of->invstd[channel + c];
            of->grad_bias[channel + c] = sum;
            of->grad_weight[channel + c] = product * invstd;
            by.mean[c] = of->mean[channel + c];
            by.k[c] = product * invstd * invstd / num_rows;
            by.grad_mean[c] = sum / num_rows;
            by.invstd[c] = invstd;
            by.weight[c] = of->weight[channel + c];
        }
        struct rows rows = part_of(of->in + channel, of->grad_out + channel, of->num_rows, stride, 1, 0);
#ifdef MEMFIT_FOR_AVX2
        if (are_vectors) {
            avx2_slope(rows, width, &by, of->grad_in + channel);
            continue;
        }
#endif
        plain_slope(rows, width, &by, of->grad_in + channel);
    }
}

void memfit_batch_norm_rows(const struct batch_norm *of, int num_threads) {
    memfit_share_out(normalise_rows, (void *)of, of->num_channels, WIDTH, num_threads);
}

void memfit_batch_norm_rows_backward(const struct batch_norm_backward *of, int num_threads) {
    memfit_share_out(slope_rows, (void *)of, of->num_channels, WIDTH, num_threads);
}

void memfit_renormalise_rows(const struct batch_norm *of, int num_threads) {
    memfit_share_out(renormalise_rows, (void *)of, of->num_channels, WIDTH, num_threads);
}
