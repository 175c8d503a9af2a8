/* Training-mode batch norm of contiguous float32 maps.
 *
 * torch adds up a channel's elements one after the other in double precision, so that each addition waits for the one
 * before: that takes longer than all else. Here eight channels are added up side by side, each in that same order, and
 * what they are in stays in the cache until they are normalised. More channels, or vectors of AVX-512, gain nothing.
 *
 * The input may be in pieces, as before a concatenation, which is then made on the way, if it is made at all. */
#include <math.h>
#include <string.h>

#include "kernels.h"

enum {
    WIDTH = 8, /* channels side by side, at the most */
    LANES = 4, /* channels in a vector of doubles */
    PLACES = 8, /* elements of a map in a vector of floats */
    LINE = 16, /* floats in a line of the cache */
    MOST_AHEAD = 1 << 16 /* floats that are fetched before it is their turn: of larger maps that gains nothing */
};

/* The piece that a channel is in; the channel becomes its number there. */
static const struct channels *piece_of(const struct batch_norm *of, int64_t *channel) {
    const struct channels *piece = of->pieces;
    for (; *channel >= piece->num_channels; piece++)
        *channel -= piece->num_channels;
    return piece;
}

static const float *map_of(const struct batch_norm *of, int64_t sample, int64_t channel) {
    if (!of->pieces)
        return of->in + (sample * of->num_channels + channel) * of->image_size;
    const struct channels *piece = piece_of(of, &channel);
    return piece->in + sample * piece->stride + channel * of->image_size;
}

/* How many channels from there on lie side by side. */
static int64_t num_side_by_side(const struct batch_norm *of, int64_t channel) {
    if (!of->pieces)
        return of->num_channels - channel;
    const struct channels *piece = piece_of(of, &channel);
    return piece->num_channels - channel;
}

/* The sums over a few channels, or if there are means, those of squared distances from them. */
static void plain_sums(const struct batch_norm *of, int64_t channel, int64_t num_channels, const float *means,
                       double *sums) {
    for (int64_t c = 0; c < num_channels; c++)
        sums[c] = 0;
    for (int64_t n = 0; n < of->num_samples; n++) {
        const float *in = map_of(of, n, channel);
        for (int64_t i = 0; i < of->image_size; i++)
            for (int64_t c = 0; c < num_channels; c++) {
                float x = in[c * of->image_size + i];
                sums[c] += means ? (x - means[c]) * (x - means[c]) : x;
            }
    }
}

#ifdef MEMFIT_FOR_AVX2
#define INLINE static inline __attribute__((always_inline))

INLINE WITH_AVX2 __m256 load_places(const float *map, int64_t count, const float *mean) {
    __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 x = count == PLACES ? _mm256_loadu_ps(map)
                               : _mm256_maskload_ps(map, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), order));
    if (mean) {
        x = _mm256_sub_ps(x, _mm256_broadcast_ss(mean));
        x = _mm256_mul_ps(x, x);
    }
    return x;
}

/* Add some places of four maps to the sums over each. A core shuffles one vector at a time, and to make doubles of
 * floats that are in a register it shuffles as well. So each half of a vector is left with one place of all four maps,
 * and becomes doubles as it is loaded again: that takes no shuffle. */
INLINE WITH_AVX2 void add_places(const float *in, int64_t size, int64_t count, const float *means, __m256d *sums) {
    _Alignas(32) float halves[PLACES][LANES];
    __m256 pairs[LANES];
#pragma GCC unroll 2
    for (int c = 0; c < LANES; c += 2) {
        __m256 one = load_places(in + c * size, count, means ? means + c : NULL);
        __m256 other = load_places(in + (c + 1) * size, count, means ? means + c + 1 : NULL);
        pairs[c] = _mm256_unpacklo_ps(one, other), pairs[c + 1] = _mm256_unpackhi_ps(one, other);
    }
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        _mm256_store_ps(halves[4 * k], _mm256_shuffle_ps(pairs[k], pairs[k + 2], 0x44));
        _mm256_store_ps(halves[4 * k + 2], _mm256_shuffle_ps(pairs[k], pairs[k + 2], 0xee));
    }
    __asm__("" : "+m"(halves)); /* or the compiler would take the halves from registers */
#pragma GCC unroll 8
    for (int64_t k = 0; k < count; k++)
        *sums = _mm256_add_pd(*sums, _mm256_cvtps_pd(_mm_load_ps(halves[k % 4 * 2 + k / 4])));
}

/* Fetch as many elements of the maps that come next as are added up. A core does not foresee that these will be read
 * where maps are small, and has nothing to wait for while it goes through others a second time. */
INLINE WITH_AVX2 void fetch_ahead(const float *in) {
#pragma GCC unroll 4
    for (int k = 0; k < WIDTH * PLACES; k += LINE)
        _mm_prefetch((const char *)(in + k), _MM_HINT_T1);
}

INLINE WITH_AVX2 void add_up(const struct batch_norm *of, int64_t channel, int num_channels, int is_ahead,
                             const float *means, double *sums) {
    int64_t size = of->image_size, whole = size / PLACES * PLACES;
    __m256d found[WIDTH / LANES];
    for (int c = 0; c < num_channels; c += LANES)
        found[c / LANES] = _mm256_setzero_pd();
    for (int64_t n = 0; n < of->num_samples; n++) {
        const float *in = map_of(of, n, channel);
        for (int64_t i = 0; i < whole; i += PLACES) {
            if (is_ahead)
                fetch_ahead(in + WIDTH * (size + i));
#pragma GCC unroll 2
            for (int c = 0; c < num_channels; c += LANES)
                add_places(in + c * size + i, size, PLACES, means ? means + c : NULL, &found[c / LANES]);
        }
        if (whole < size)
#pragma GCC unroll 2
            for (int c = 0; c < num_channels; c += LANES)
                add_places(in + c * size + whole, size, size - whole, means ? means + c : NULL, &found[c / LANES]);
    }
    for (int c = 0; c < num_channels; c += LANES)
        _mm256_storeu_pd(sums + c, found[c / LANES]);
}

/* Four channels, or eight, of those before the end of a thread's share. */
WITH_AVX2 static void avx2_sums(const struct batch_norm *of, int64_t channel, int64_t width, int64_t end,
                                const float *means, double *sums) {
    int64_t num_ahead = WIDTH * of->num_samples * of->image_size;
    if (width == WIDTH && means)
        add_up(of, channel, WIDTH, channel + 2 * WIDTH <= end && num_ahead <= MOST_AHEAD, means, sums);
    else if (width == WIDTH)
        add_up(of, channel, WIDTH, 0, NULL, sums);
    else if (means)
        add_up(of, channel, LANES, 0, means, sums);
    else
        add_up(of, channel, LANES, 0, NULL, sums);
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
        const float *in = map_of(of, n, channel);
        if (of->whole)
            memcpy(of->whole + at, in, (size_t)of->image_size * sizeof *in);
#ifdef MEMFIT_FOR_AVX2
        if (memfit_has_avx2()) {
            avx2_scale(in, of->out + at, of->image_size, alpha, beta, lowest_of(of));
            continue;
        }
#endif
        plain_scale(in, of->out + at, of->image_size, alpha, beta, lowest_of(of));
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
    int has_avx2 = memfit_has_avx2();
    for (int64_t channel = begin, width; channel < end; channel += width) {
        width = least(least(WIDTH, end - channel), num_side_by_side(of, channel));
        if (has_avx2 && LANES < width && width < WIDTH)
            width = LANES; /* the rest is left to plain loops */
        double sums[WIDTH];
        float means[WIDTH], alpha, beta;
        for (int is_var = 0; is_var < 2; is_var++) {
            const float *known = is_var ? means : NULL;
#ifdef MEMFIT_FOR_AVX2
            if (has_avx2 && width >= LANES)
                avx2_sums(of, channel, width, end, known, sums);
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
