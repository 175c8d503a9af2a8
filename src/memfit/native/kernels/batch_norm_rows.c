/* Training-mode batch norm of float32 maps whose channels are last in memory, and its backward: rows of channels.
 *
 * torch shares the rows out over its threads, each of which adds up its part in single precision; the parts are then
 * added up in double. It goes through all rows three times, and in backward it divides twice for each element, always
 * the same numbers. Here a few channels at a time are gone through, so that they are still in the cache the next time,
 * and threads have channels of their own; the parts are kept apart all the same, as that is what bits depend on. */
#include <math.h>
#include <string.h>

#include "kernels.h"

enum { WIDTH = 8, BLOCK = 4 * WIDTH /* channels at a time */, AHEAD = 16 /* rows that are fetched before their turn */ };

struct rows {
    const float *in;
    float *grad; /* without one, what is added up is that of the forward pass */
    const float *gate;
    int64_t count, stride;
};

static struct rows part_of(struct rows all, int64_t num_parts, int64_t part) {
    int64_t length = (all.count + num_parts - 1) / num_parts;
    int64_t begin = least(part * length, all.count), end = least(begin + length, all.count), at = begin * all.stride;
    return (struct rows){all.in + at, all.grad ? all.grad + at : NULL, all.gate ? all.gate + at : NULL, end - begin,
                         all.stride};
}

/* Add up some channels over a part's rows: elements, squared distances from the means if there are any; with a
 * gradient, that and its products with the distances. */
static void plain_sums(struct rows of, int64_t width, const float *means, float *sums, float *products) {
    for (int64_t c = 0; c < width; c++)
        sums[c] = products[c] = 0;
    for (int64_t r = 0; r < of.count; r++)
        for (int64_t c = 0; c < width; c++) {
            int64_t at = r * of.stride + c;
            float x = of.in[at], distance = means ? x - means[c] : 0;
            if (of.grad) {
                if (of.gate && of.gate[at] <= 0)
                    of.grad[at] = 0;
                sums[c] += of.grad[at];
                products[c] = fmaf(distance, of.grad[at], products[c]);
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
                __builtin_prefetch(of.grad + (r + AHEAD) * of.stride + v * WIDTH, of.gate != NULL);
            if (of.gate)
                __builtin_prefetch(of.gate + (r + AHEAD) * of.stride + v * WIDTH);
        }
        for (int v = 0; v < num_vectors; v++) {
            __m256 x = _mm256_loadu_ps(of.in + r * of.stride + v * WIDTH), distance = _mm256_sub_ps(x, mean[v]);
            if (of.grad) {
                __m256 grad = _mm256_loadu_ps(of.grad + r * of.stride + v * WIDTH);
                if (of.gate) {
                    __m256 gate = _mm256_loadu_ps(of.gate + r * of.stride + v * WIDTH);
                    grad = _mm256_andnot_ps(_mm256_cmp_ps(gate, _mm256_setzero_ps(), _CMP_LE_OQ), grad);
                    _mm256_storeu_ps(of.grad + r * of.stride + v * WIDTH, grad);
                }
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

/* Each for a whole block of channels or a vector of them: of what is known here the loops above are made without asking
 * again for each row. */
#define SUM_UP(rows, means) \
    width == BLOCK ? sum_vectors(rows, 4, means, sums, products) : sum_vectors(rows, 1, means, sums, products)

WITH_AVX2 static void avx2_sums(struct rows of, int64_t width, const float *means, float *sums, float *products) {
    if (of.gate)
        SUM_UP(of, means);
    else if (of.grad)
        SUM_UP(((struct rows){of.in, of.grad, NULL, of.count, of.stride}), means);
    else if (means)
        SUM_UP(((struct rows){of.in, NULL, NULL, of.count, of.stride}), means);
    else
        SUM_UP(((struct rows){of.in, NULL, NULL, of.count, of.stride}), NULL);
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

static struct rows rows_of(const struct batch_norm *of, int64_t channel) {
    return (struct rows){of->in + channel, NULL, NULL, of->num_samples * of->image_size, of->num_channels};
}

static void scale_rows(const struct batch_norm *of, int64_t channel, int64_t width, int are_vectors) {
    struct rows rows = rows_of(of, channel);
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
    int64_t num_rows = of->num_samples * of->image_size, width;
    for (int64_t channel = begin; channel < end; channel += width) {
        int are_vectors;
        width = width_of(end - channel, &are_vectors);
        float means[BLOCK], sums[BLOCK], unused[BLOCK];
        for (int is_var = 0; is_var < 2; is_var++) {
            double totals[BLOCK] = {0};
            for (int64_t part = 0; part < of->num_parts; part++) {
                add_up(part_of(rows_of(of, channel), of->num_parts, part), width, are_vectors,
                       is_var ? means : NULL, sums, unused);
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

static struct rows rows_behind(const struct batch_norm_backward *of, int64_t channel) {
    const float *gate = of->gate ? of->gate + channel : NULL;
    return (struct rows){of->in + channel, of->grad_out + channel, gate, of->num_samples * of->image_size,
                         of->num_channels};
}

static void sums_behind(const struct batch_norm_backward *of, int64_t channel, int64_t width, int are_vectors,
                        float *sums, float *products) {
    double total_sums[BLOCK] = {0}, total_products[BLOCK] = {0};
    for (int64_t part = 0; part < of->num_parts; part++) {
        struct rows rows = part_of(rows_behind(of, channel), of->num_parts, part);
        add_up(rows, width, are_vectors, of->mean + channel, sums, products);
        for (int64_t c = 0; c < width; c++) {
            total_sums[c] += sums[c];
            total_products[c] += products[c];
        }
    }
    for (int64_t c = 0; c < width; c++) {
        sums[c] = (float)total_sums[c];
        products[c] = (float)total_products[c];
    }
}

static void slope_rows(void *given, int64_t begin, int64_t end) {
    const struct batch_norm_backward *of = given;
    int64_t width;
    float num_rows = (float)(of->num_samples * of->image_size);
    for (int64_t channel = begin; channel < end; channel += width) {
        int are_vectors;
        width = width_of(end - channel, &are_vectors);
        float sums[BLOCK], products[BLOCK];
        sums_behind(of, channel, width, are_vectors, sums, products);
        struct slopes by;
        for (int64_t c = 0; c < width; c++) {
            float invstd = of->invstd[channel + c];
            of->grad_bias[channel + c] = sums[c];
            of->grad_weight[channel + c] = products[c] * invstd;
            by.mean[c] = of->mean[channel + c];
            by.k[c] = products[c] * invstd * invstd / num_rows;
            by.grad_mean[c] = sums[c] / num_rows;
            by.invstd[c] = invstd;
            by.weight[c] = of->weight[channel + c];
        }
        struct rows rows = rows_behind(of, channel);
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
