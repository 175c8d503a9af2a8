/* The backward of training-mode batch norm of contiguous float32 maps.
 *
 * torch adds up the map of each sample in eight lanes of single precision, these among themselves, and samples in double:
 * the gradient, and its products with the distances from the mean. Each addition waits for the one before. Then it goes
 * through the maps twice to make the gradient of the input. Here several samples are added up side by side, and the
 * gradient is made in one pass. The backward of a ReLU behind the batch norm is part of both, so that what comes in is
 * read from memory once; a channel is done before the next begins, so the result may overwrite the gradient. */
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

/* What a ReLU's backward leaves of a gradient; a gate that is no number is open. */
static inline float gated(float grad, const float *gate, int64_t at) { return gate && gate[at] <= 0 ? 0 : grad; }

/* Add up the maps of one channel in some samples that follow each other: each by itself. */
static void plain_sums(const struct batch_norm_backward *of, int64_t at, float mean, int count, float *sums,
                       float *products) {
    int64_t whole = of->image_size / WIDTH * WIDTH;
    for (int n = 0; n < count; n++, at += of->num_channels * of->image_size) {
        const float *in = of->in + at;
        float lanes[WIDTH], dots[WIDTH];
        for (int64_t i = 0; i < of->image_size; i++) {
            float distance = in[i] - mean, *lane = &lanes[i % WIDTH], *dot = &dots[i % WIDTH];
            float grad = gated(of->grad_out[at + i], of->gate, at + i);
            *lane = i < WIDTH ? grad : *lane + grad;
            if (i >= whole) /* there torch's compiler made one operation of two */
                *dot = fmaf(distance, grad, *dot);
            else
                *dot = i < WIDTH ? distance * grad : *dot + distance * grad;
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

static void plain_slope(const struct batch_norm_backward *of, int64_t at, struct slope by) {
    for (int64_t i = at; i < at + of->image_size; i++)
        of->grad_in[i] = slope_at(by, of->in[i], gated(of->grad_out[i], of->gate, i));
}

#ifdef MEMFIT_FOR_AVX2
#define INLINE static inline __attribute__((always_inline))

/* The gradient there, behind the gate if there is one. */
INLINE WITH_AVX2 __m256 grad_at(const struct batch_norm_backward *of, int64_t at, int has_gate) {
    __m256 grad = _mm256_loadu_ps(of->grad_out + at);
    if (!has_gate)
        return grad;
    __m256 is_shut = _mm256_cmp_ps(_mm256_loadu_ps(of->gate + at), _mm256_setzero_ps(), _CMP_LE_OQ);
    return _mm256_andnot_ps(is_shut, grad);
}

INLINE WITH_AVX2 __m256 distance_at(const struct batch_norm_backward *of, int64_t at, __m256 mean) {
    return _mm256_sub_ps(_mm256_loadu_ps(of->in + at), mean);
}

INLINE WITH_AVX2 void sum_samples(const struct batch_norm_backward *of, int64_t at, float mean, int count, int has_gate,
                                  float *sums, float *products) {
    int64_t size = of->image_size, stride = of->num_channels * size, whole = size / WIDTH * WIDTH;
    __m256 lanes[SIDE_BY_SIDE], dots[SIDE_BY_SIDE], means = _mm256_set1_ps(mean);
    for (int n = 0; n < count; n++) {
        lanes[n] = grad_at(of, at + n * stride, has_gate);
        dots[n] = _mm256_mul_ps(distance_at(of, at + n * stride, means), lanes[n]);
    }
    for (int64_t i = WIDTH; i < whole; i += WIDTH)
#pragma GCC unroll 4
        for (int n = 0; n < count; n++) {
            int64_t place = at + n * stride + i;
            __m256 grad = grad_at(of, place, has_gate);
            lanes[n] = _mm256_add_ps(lanes[n], grad);
            dots[n] = _mm256_add_ps(dots[n], _mm256_mul_ps(distance_at(of, place, means), grad));
        }
    for (int n = 0; n < count; n++) {
        float left[2][WIDTH];
        _mm256_storeu_ps(left[0], lanes[n]), _mm256_storeu_ps(left[1], dots[n]);
        for (int64_t i = whole; i < size; i++) {
            int64_t place = at + n * stride + i;
            float grad = gated(of->grad_out[place], of->gate, place);
            left[0][i - whole] += grad;
            left[1][i - whole] = fmaf(of->in[place] - mean, grad, left[1][i - whole]);
        }
        sums[n] = lanes_sum(left[0]), products[n] = lanes_sum(left[1]);
    }
}

WITH_AVX2 static void avx2_sums(const struct batch_norm_backward *of, int64_t at, float mean, int count, float *sums,
                                float *products) {
    if (count == SIDE_BY_SIDE && of->gate)
        sum_samples(of, at, mean, SIDE_BY_SIDE, 1, sums, products);
    else if (count == SIDE_BY_SIDE)
        sum_samples(of, at, mean, SIDE_BY_SIDE, 0, sums, products);
    else
        for (int n = 0; n < count; n++)
            sum_samples(of, at + n * of->num_channels * of->image_size, mean, 1, of->gate != NULL, sums + n, products + n);
}

INLINE WITH_AVX2 void slope_map(const struct batch_norm_backward *of, int64_t at, struct slope by, int has_gate) {
    __m256 mean = _mm256_set1_ps(by.mean), k = _mm256_set1_ps(by.k), grad_mean = _mm256_set1_ps(by.grad_mean);
    __m256 invstd = _mm256_set1_ps(by.invstd), weight = _mm256_set1_ps(by.weight);
    int64_t i = at, end = at + of->image_size;
    for (; i + WIDTH <= end; i += WIDTH) {
        __m256 rest = _mm256_sub_ps(grad_at(of, i, has_gate), grad_mean);
        rest = _mm256_fnmadd_ps(distance_at(of, i, mean), k, rest);
        _mm256_storeu_ps(of->grad_in + i, _mm256_mul_ps(_mm256_mul_ps(rest, invstd), weight));
    }
    for (; i < end; i++)
        of->grad_in[i] = slope_at(by, of->in[i], gated(of->grad_out[i], of->gate, i));
}

WITH_AVX2 static void avx2_slope(const struct batch_norm_backward *of, int64_t at, struct slope by) {
    if (of->gate)
        slope_map(of, at, by, 1);
    else
        slope_map(of, at, by, 0);
}
#endif

static void do_channels(void *job, int64_t begin, int64_t end) {
    const struct batch_norm_backward *of = job;
    void (*sum)(const struct batch_norm_backward *, int64_t, float, int, float *, float *) = plain_sums;
    void (*slope)(const struct batch_norm_backward *, int64_t, struct slope) = plain_slope;
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
        for (int64_t n = 0; n < of->num_samples; n++)
            slope(of, n * stride + c * of->image_size, by);
    }
}

void memfit_batch_norm_backward(const struct batch_norm_backward *of, int num_threads) {
    memfit_share_out(do_channels, (void *)of, of->num_channels, 1, num_threads);
}
