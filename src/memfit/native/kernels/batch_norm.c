/* Training-mode batch norm of contiguous float32 maps.
 *
 * torch adds up a channel's elements one after the other in double precision, so that each addition waits for the one
 * before: that takes longer than all else. Here eight channels are added up side by side, each in that same order, and
 * what they are in stays in the cache until they are normalised. */
#include <math.h>

#include "kernels.h"

enum { WIDTH = 8 /* channels side by side */ };

/* The sums over a few channels, or if there are means, those of squared distances from them. */
static void plain_sums(const struct batch_norm *of, int64_t channel, int64_t num_channels, const float *means,
                       double *sums) {
    for (int64_t c = 0; c < num_channels; c++)
        sums[c] = 0;
    for (int64_t n = 0; n < of->num_samples; n++) {
        const float *in = of->in + (n * of->num_channels + channel) * of->image_size;
        for (int64_t i = 0; i < of->image_size; i++)
            for (int64_t c = 0; c < num_channels; c++) {
                float x = in[c * of->image_size + i];
                sums[c] += means ? (x - means[c]) * (x - means[c]) : x;
            }
    }
}

#ifdef MEMFIT_FOR_AVX2
/* Rows become columns. */
WITH_AVX2 static inline void transpose(__m256 rows[WIDTH]) {
    __m256 pairs[WIDTH], fours[WIDTH];
    for (int k = 0; k < WIDTH; k += 2) {
        pairs[k] = _mm256_unpacklo_ps(rows[k], rows[k + 1]);
        pairs[k + 1] = _mm256_unpackhi_ps(rows[k], rows[k + 1]);
    }
    for (int k = 0; k < WIDTH; k += 4) {
        fours[k] = _mm256_shuffle_ps(pairs[k], pairs[k + 2], 0x44);
        fours[k + 1] = _mm256_shuffle_ps(pairs[k], pairs[k + 2], 0xee);
        fours[k + 2] = _mm256_shuffle_ps(pairs[k + 1], pairs[k + 3], 0x44);
        fours[k + 3] = _mm256_shuffle_ps(pairs[k + 1], pairs[k + 3], 0xee);
    }
    for (int k = 0; k < 4; k++) {
        rows[k] = _mm256_permute2f128_ps(fours[k], fours[k + 4], 0x20);
        rows[k + 4] = _mm256_permute2f128_ps(fours[k], fours[k + 4], 0x31);
    }
}

WITH_AVX2 static inline void add_eight(__m256 x, const float *means, __m256d *low, __m256d *high) {
    if (means) {
        x = _mm256_sub_ps(x, _mm256_loadu_ps(means));
        x = _mm256_mul_ps(x, x);
    }
    *low = _mm256_add_pd(*low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    *high = _mm256_add_pd(*high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}

WITH_AVX2 static inline void avx2_sums(const struct batch_norm *of, int64_t channel, const float *means, double *sums) {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    int64_t size = of->image_size;
    for (int64_t n = 0; n < of->num_samples; n++) {
        const float *in = of->in + (n * of->num_channels + channel) * size;
        int64_t i = 0;
        for (; i + WIDTH <= size; i += WIDTH) {
            __m256 rows[WIDTH];
            for (int c = 0; c < WIDTH; c++)
                rows[c] = _mm256_loadu_ps(in + c * size + i);
            transpose(rows);
            for (int k = 0; k < WIDTH; k++)
                add_eight(rows[k], means, &low, &high);
        }
        for (; i < size; i++)
            add_eight(_mm256_setr_ps(in[i], in[size + i], in[2 * size + i], in[3 * size + i], in[4 * size + i],
                                     in[5 * size + i], in[6 * size + i], in[7 * size + i]),
                      means, &low, &high);
    }
    _mm256_storeu_pd(sums, low);
    _mm256_storeu_pd(sums + 4, high);
}

WITH_AVX2 static void avx2_scale(const float *in, float *out, int64_t size, float alpha, float beta, float lowest) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        __m256 made = _mm256_fmadd_ps(_mm256_loadu_ps(in + i), _mm256_set1_ps(alpha), _mm256_set1_ps(beta));
        _mm256_storeu_ps(out + i, _mm256_max_ps(_mm256_set1_ps(lowest), made));
    }
    for (; i < size; i++)
        out[i] = no_less(__builtin_fmaf(in[i], alpha, beta), lowest);
}
#endif

static void plain_scale(const float *in, float *out, int64_t size, float alpha, float beta, float lowest) {
    for (int64_t i = 0; i < size; i++)
        out[i] = no_less(fmaf(in[i], alpha, beta), lowest);
}

static void scale(const struct batch_norm *of, int64_t channel, float alpha, float beta) {
    for (int64_t n = 0; n < of->num_samples; n++) {
        int64_t at = (n * of->num_channels + channel) * of->image_size;
#ifdef MEMFIT_FOR_AVX2
        if (memfit_has_avx2()) {
            avx2_scale(of->in + at, of->out + at, of->image_size, alpha, beta, lowest_of(of));
            continue;
        }
#endif
        plain_scale(of->in + at, of->out + at, of->image_size, alpha, beta, lowest_of(of));
    }
}

void memfit_finish_channel(const struct batch_norm *of, int64_t c, float mean, double squares) {
    int64_t count = of->num_samples * of->image_size;
    float var_sum = (float)squares;
    double var = var_sum / (float)count;
    of->save_mean[c] = mean;
    of->save_invstd[c] = var != 0 || of->eps != 0 ? (float)(1 / sqrt(var + of->eps)) : 0;
    float momentum = (float)of->momentum;
    if (of->running_mean)
        of->running_mean[c] = momentum * mean + (1 - momentum) * of->running_mean[c];
    if (of->running_var) {
        double unbiased = var_sum / (float)(count - 1);
        of->running_var[c] = (float)(momentum * unbiased + (1 - momentum) * of->running_var[c]);
    }
}

void memfit_line_of(const struct batch_norm *of, int64_t c, float *alpha, float *beta) {
    *alpha = of->weight ? of->save_invstd[c] * of->weight[c] : of->save_invstd[c];
    *beta = fmaf(-of->save_mean[c], *alpha, of->bias ? of->bias[c] : 0);
}

/* A few channels, from first to last: what is read twice is still in the cache. */
static void normalise(void *given, int64_t begin, int64_t end) {
    const struct batch_norm *of = given;
    int64_t size = of->image_size, count = of->num_samples * size;
    for (int64_t channel = begin; channel < end; channel += WIDTH) {
        int64_t width = least(WIDTH, end - channel);
        double sums[WIDTH];
        float means[WIDTH], alpha, beta;
        for (int is_var = 0; is_var < 2; is_var++) {
            const float *known = is_var ? means : NULL;
#ifdef MEMFIT_FOR_AVX2
            if (memfit_has_avx2() && width == WIDTH)
                avx2_sums(of, channel, known, sums);
            else
#endif
                plain_sums(of, channel, width, known, sums);
            for (int64_t c = 0; c < width; c++) {
                if (is_var)
                    memfit_finish_channel(of, channel + c, means[c], sums[c]);
                else
                    means[c] = (float)(sums[c] / (double)count);
            }
        }
        for (int64_t c = 0; c < width; c++) {
            memfit_line_of(of, channel + c, &alpha, &beta);
            scale(of, channel + c, alpha, beta);
        }
    }
}

static void renormalise(void *given, int64_t begin, int64_t end) {
    const struct batch_norm *of = given;
    for (int64_t channel = begin; channel < end; channel++) {
        float alpha, beta;
        memfit_line_of(of, channel, &alpha, &beta);
        scale(of, channel, alpha, beta);
    }
}

void memfit_batch_norm(const struct batch_norm *of, int num_threads) {
    memfit_share_out(normalise, (void *)of, of->num_channels, WIDTH, num_threads);
}

void memfit_renormalise(const struct batch_norm *of, int num_threads) {
    memfit_share_out(renormalise, (void *)of, of->num_channels, 1, num_threads);
}
