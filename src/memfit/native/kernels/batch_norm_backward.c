/* The backward of training-mode batch norm of contiguous float32 maps.
 *
 * torch adds up the map of each sample in eight lanes of single precision, these among themselves, and samples in double:
 * the gradient, and its products with the distances from the mean. Each addition waits for the one before. Then it goes
 * through the maps twice to make the gradient of the input. Here several samples are added up side by side, and the
 * gradient is made in one pass. */
#include <math.h>
#include <string.h>

#include "kernels.h"

enum { WIDTH = 8, SIDE_BY_SIDE = 4 };

/* What torch makes of eight lanes. */
static float lanes_sum(const float lanes[WIDTH]) {
    float halves[WIDTH / 2];
    for (int k = 0; k < WIDTH / 2; k++)
        halves[k] = lanes[k] + lanes[k + WIDTH / 2];
    return (halves[0] + halves[2]) + (halves[1] + halves[3]);
}

/* Add up the maps of one channel in some samples that follow each other: each by itself. */
static void plain_sums(const struct batch_norm_backward *of, int64_t at, float mean, int count, float *sums,
                       float *products) {
    int64_t whole = of->image_size / WIDTH * WIDTH;
    for (int n = 0; n < count; n++, at += of->num_channels * of->image_size) {
        const float *in = of->in + at, *grad = of->grad_out + at;
        float lanes[WIDTH], dots[WIDTH];
        for (int64_t i = 0; i < of->image_size; i++) {
            float distance = in[i] - mean, *lane = &lanes[i % WIDTH], *dot = &dots[i % WIDTH];
            *lane = i < WIDTH ? grad[i] : *lane + grad[i];
            if (i >= whole) /* there torch's compiler made one operation of two */
                *dot = fmaf(distance, grad[i], *dot);
            else
                *dot = i < WIDTH ? distance * grad[i] : *dot + distance * grad[i];
        }
        sums[n] = lanes_sum(lanes), products[n] = lanes_sum(dots);
    }
}

/* What each element's gradient is made of. */
struct slope {
    float mean, k, grad_mean, invstd, weight;
};

static float slope_at(struct slope by, float x, float grad) {
    return fmaf(-(x - by.mean), by.k, grad - by.grad_mean) * by.invstd * by.weight;
}

static void plain_slope(const float *in, const float *grad, float *out, int64_t size, struct slope by) {
    for (int64_t i = 0; i < size; i++)
        out[i] = slope_at(by, in[i], grad[i]);
}

#ifdef MEMFIT_FOR_AVX2
#define INLINE static inline __attribute__((always_inline))

INLINE WITH_AVX2 __m256 distance_times(const float *in, const float *grad, __m256 mean) {
    return _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(in), mean), _mm256_loadu_ps(grad));
}

INLINE WITH_AVX2 void sum_samples(const struct batch_norm_backward *of, int64_t at, float mean, int count, float *sums,
                                  float *products) {
    int64_t size = of->image_size, stride = of->num_channels * size, whole = size / WIDTH * WIDTH;
    const float *in = of->in + at, *grad = of->grad_out + at;
    __m256 lanes[SIDE_BY_SIDE], dots[SIDE_BY_SIDE], means = _mm256_set1_ps(mean);
    for (int n = 0; n < count; n++) {
        lanes[n] = _mm256_loadu_ps(grad + n * stride);
        dots[n] = distance_times(in + n * stride, grad + n * stride, means);
    }
    for (int64_t i = WIDTH; i < whole; i += WIDTH)
#pragma GCC unroll 4
        for (int n = 0; n < count; n++) {
            int64_t place = n * stride + i;
            lanes[n] = _mm256_add_ps(lanes[n], _mm256_loadu_ps(grad + place));
            dots[n] = _mm256_add_ps(dots[n], distance_times(in + place, grad + place, means));
        }
    for (int n = 0; n < count; n++) {
        float left[2][WIDTH];
        _mm256_storeu_ps(left[0], lanes[n]), _mm256_storeu_ps(left[1], dots[n]);
        for (int64_t i = whole; i < size; i++) {
            int64_t place = n * stride + i;
            left[0][i - whole] += grad[place];
            left[1][i - whole] = fmaf(in[place] - mean, grad[place], left[1][i - whole]);
        }
        sums[n] = lanes_sum(left[0]), products[n] = lanes_sum(left[1]);
    }
}

WITH_AVX2 static void avx2_sums(const struct batch_norm_backward *of, int64_t at, float mean, int count, float *sums,
                                float *products) {
    if (count == SIDE_BY_SIDE)
        sum_samples(of, at, mean, SIDE_BY_SIDE, sums, products);
    else
        for (int n = 0; n < count; n++)
            sum_samples(of, at + n * of->num_channels * of->image_size, mean, 1, sums + n, products + n);
}

WITH_AVX2 static void avx2_slope(const float *in, const float *grad, float *out, int64_t size, struct slope by) {
    __m256 mean = _mm256_set1_ps(by.mean), k = _mm256_set1_ps(by.k), grad_mean = _mm256_set1_ps(by.grad_mean);
    __m256 invstd = _mm256_set1_ps(by.invstd), weight = _mm256_set1_ps(by.weight);
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        __m256 distance = _mm256_sub_ps(_mm256_loadu_ps(in + i), mean);
        __m256 rest = _mm256_sub_ps(_mm256_loadu_ps(grad + i), grad_mean);
        rest = _mm256_fnmadd_ps(distance, k, rest);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(rest, invstd), weight));
    }
    for (; i < size; i++)
        out[i] = slope_at(by, in[i], grad[i]);
}
#endif

static void do_channels(void *job, int64_t begin, int64_t end) {
    const struct batch_norm_backward *of = job;
    void (*sum)(const struct batch_norm_backward *, int64_t, float, int, float *, float *) = plain_sums;
    void (*slope)(const float *, const float *, float *, int64_t, struct slope) = plain_slope;
#ifdef MEMFIT_FOR_AVX2
    if (memfit_has_avx2())
        sum = avx2_sums, slope = avx2_slope;
#endif
    int64_t stride = of->num_channels * of->image_size, num_elements = of->num_samples * of->image_size;
    for (int64_t c = begin; c < end; c++) {
        float mean = of->mean[c], invstd = of->invstd[c];
        double total = 0, dot = 0;
        for (int64_t n = 0; n < of->num_samples; n += SIDE_BY_SIDE) {
            int count = (int)least(SIDE_BY_SIDE, of->num_samples - n);
            float sums[SIDE_BY_SIDE], products[SIDE_BY_SIDE];
            sum(of, n * stride + c * of->image_size, mean, count, sums, products);
            for (int k = 0; k < count; k++)
                total += sums[k], dot += products[k];
        }
        of->grad_bias[c] = (float)total;
        of->grad_weight[c] = (float)(dot * invstd);
        struct slope by = {mean, (float)dot * invstd * invstd / num_elements, (float)(total / num_elements), invstd,
                           of->weight[c]};
        for (int64_t n = 0; n < of->num_samples; n++) {
            int64_t at = n * stride + c * of->image_size;
            slope(of->in + at, of->grad_out + at, of->grad_in + at, of->image_size, by);
        }
    }
}

void memfit_batch_norm_backward(const struct batch_norm_backward *of, int num_threads) {
    memfit_share_out(do_channels, (void *)of, of->num_channels, 1, num_threads);
}
