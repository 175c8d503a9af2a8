/* Calls every stand-in on random tensors in buffers of just their size, for the sanitizers to watch.
 *
 * With and without AVX2 the results must be the same; those of convolutions and products, which ask for AVX-512, must
 * be what plain loops make that add up in the order they are told. Sizes, settings and numbers of threads are random.
 * Usage: kernel_driver ROUNDS SEED. Exits with 1 and a line of text at the first disagreement. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

static uint64_t state;

static int64_t draw(int64_t low, int64_t high) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return low + (int64_t)((x ^ x >> 31) % (uint64_t)(high - low + 1));
}

static float *floats(int64_t count) {
    float *made = malloc((size_t)count * sizeof *made);
    for (int64_t i = 0; i < count; i++)
        made[i] = (float)draw(-1000, 1000) / 64;
    return made;
}

static void same(const char *what, const void *first, const void *second, size_t size) {
    if (memcmp(first, second, size)) {
        printf("%s: with vectors the result is another one\n", what);
        exit(1);
    }
}

static void try_batch_norm(int has_rows) {
    int is_large = draw(1, 60) == 1; /* more than is fetched ahead */
    int64_t n = is_large ? 4 : draw(1, 4), c = draw(1, 70), size = is_large ? draw(2050, 2090) : draw(2, 60);
    int64_t all = n * c * size, num_parts = draw(1, 5), is_rectified = draw(0, 1);
    float *in = floats(all), *weight = floats(c), *bias = floats(c), *vectors[2][4], *out[2], *whole = floats(all);
    int64_t first = draw(0, 1) * draw(0, c - 1); /* channels of the first piece */
    if (!first || has_rows)
        memcpy(whole, in, (size_t)all * sizeof(float));
    for (int k = 0; k < 2; k++) {
        out[k] = floats(all);
        for (int v = 0; v < 4; v++)
            vectors[k][v] = calloc((size_t)c, sizeof(float));
        memfit_allow_avx2(k);
        struct batch_norm of = {in, weight, bias, vectors[k][0], vectors[k][1], out[k], vectors[k][2], vectors[k][3],
                                0.1, 1e-5, n, c, size, num_parts, is_rectified};
        /* In pieces the second time only: the result must be that of the first. */
        struct channels pieces[] = {{in, c * size, first}, {in + first * size, c * size, c - first}};
        if (k && !has_rows && first)
            of.in = NULL, of.pieces = pieces, of.whole = whole;
        (has_rows ? memfit_batch_norm_rows : memfit_batch_norm)(&of, (int)draw(1, 5));
    }
    same("batch norm", out[0], out[1], (size_t)all * sizeof(float));
    same("pieces together", in, whole, (size_t)all * sizeof(float));
    for (int v = 0; v < 4; v++) {
        same("statistics", vectors[0][v], vectors[1][v], (size_t)c * sizeof(float));
        free(vectors[0][v]), free(vectors[1][v]);
    }
    free(in), free(weight), free(bias), free(out[0]), free(out[1]), free(whole);
}

static void try_batch_norm_backward(int has_rows) {
    int64_t c = draw(1, 70), n = draw(1, 9), size = draw(8, 60), all = c * n * size, num_parts = draw(1, 5);
    int is_gated = (int)draw(0, 1), is_in_place = (int)draw(0, 1);
    float *grad = floats(all), *in = floats(all), *gate = floats(all), *given[3], *grads[2], *out[2], *vectors[2][2];
    for (int v = 0; v < 3; v++)
        given[v] = floats(c);
    for (int k = 0; k < 2; k++) {
        out[k] = floats(all), vectors[k][0] = floats(c), vectors[k][1] = floats(c), grads[k] = floats(all);
        memcpy(grads[k], grad, (size_t)all * sizeof(float));
        memfit_allow_avx2(k);
        /* In place the second time only: the result must be that of the first. */
        struct batch_norm_backward of = {grads[k], in, given[0], given[1], given[2], is_gated ? gate : NULL,
                                         k && is_in_place ? grads[k] : out[k], vectors[k][0], vectors[k][1], n, c, size,
                                         num_parts};
        (has_rows ? memfit_batch_norm_rows_backward : memfit_batch_norm_backward)(&of, (int)draw(1, 5));
    }
    same("gradients of batch norm", out[0], is_in_place ? grads[1] : out[1], (size_t)all * sizeof(float));
    for (int v = 0; v < 2; v++) {
        same("gradients of vectors", vectors[0][v], vectors[1][v], (size_t)c * sizeof(float));
        free(vectors[0][v]), free(vectors[1][v]);
    }
    for (int v = 0; v < 3; v++)
        free(given[v]);
    free(grad), free(in), free(gate), free(out[0]), free(out[1]), free(grads[0]), free(grads[1]);
}

static void try_max_pool(void) {
    struct max_pool of = {.num_planes = draw(1, 5), .kernel_height = draw(1, 4), .kernel_width = draw(1, 4),
                          .stride_height = draw(1, 3), .stride_width = draw(1, 3), .dilation_height = draw(1, 3),
                          .dilation_width = draw(1, 3)};
    of.pad_height = draw(0, of.kernel_height / 2), of.pad_width = draw(0, of.kernel_width / 2);
    int64_t tall = (of.kernel_height - 1) * of.dilation_height + 1, wide = (of.kernel_width - 1) * of.dilation_width + 1;
    of.in_height = draw(tall, tall + 12), of.in_width = draw(wide, wide + 40);
    of.out_height = (of.in_height + 2 * of.pad_height - tall) / of.stride_height + 1;
    of.out_width = (of.in_width + 2 * of.pad_width - wide) / of.stride_width + 1;
    size_t count = (size_t)(of.num_planes * of.out_height * of.out_width);
    float *in = floats(of.num_planes * of.in_height * of.in_width), *out[2];
    int64_t *indices[2];
    of.in = in;
    for (int k = 0; k < 2; k++) {
        of.out = out[k] = malloc(count * sizeof(float));
        of.indices = indices[k] = malloc(count * sizeof(int64_t));
        memfit_allow_avx2(k);
        memfit_max_pool(&of, (int)draw(1, 5));
    }
    same("maxima", out[0], out[1], count * sizeof(float));
    same("places", indices[0], indices[1], count * sizeof(int64_t));
    free(in), free(out[0]), free(out[1]), free(indices[0]), free(indices[1]);
}

static void try_average_pool(int is_backward) {
    struct average_pool of = {.num_planes = draw(1, 5), .kernel_height = draw(1, 4), .kernel_width = draw(1, 4),
                              .counts_padding = draw(0, 1), .divisor = draw(0, 1) * draw(1, 9)};
    of.stride_height = draw(is_backward ? of.kernel_height : 1, 5);
    of.stride_width = draw(is_backward ? of.kernel_width : 1, 5);
    of.pad_height = draw(0, of.kernel_height / 2), of.pad_width = draw(0, of.kernel_width / 2);
    of.in_height = draw(of.kernel_height, of.kernel_height + 12);
    of.in_width = draw(of.kernel_width, of.kernel_width + 40);
    of.out_height = (of.in_height + 2 * of.pad_height - of.kernel_height) / of.stride_height + 1;
    of.out_width = (of.in_width + 2 * of.pad_width - of.kernel_width) / of.stride_width + 1;
    int64_t before = of.num_planes * of.in_height * of.in_width, after = of.num_planes * of.out_height * of.out_width;
    float *in = floats(is_backward ? after : before), *out[2];
    of.in = in;
    for (int k = 0; k < 2; k++) {
        of.out = out[k] = floats(is_backward ? before : after);
        memfit_allow_avx2(k);
        (is_backward ? memfit_average_pool_backward : memfit_average_pool)(&of, (int)draw(1, 5));
    }
    same(is_backward ? "gradients of averages" : "averages", out[0], out[1],
         (size_t)(is_backward ? before : after) * sizeof(float));
    free(in), free(out[0]), free(out[1]);
}

static void try_additions(void) {
    enum { MOST = 5 };
    struct addition all[MOST];
    float *into[2][MOST], *what[MOST];
    int64_t count = draw(1, MOST), num_into[MOST];
    for (int64_t a = 0; a < count; a++) {
        int64_t n = draw(1, 5), size = draw(1, 70), into_stride = size + draw(0, 9), what_stride = size + draw(0, 9);
        num_into[a] = n * into_stride;
        into[0][a] = floats(num_into[a]), into[1][a] = floats(num_into[a]), what[a] = floats(n * what_stride);
        memcpy(into[1][a], into[0][a], (size_t)num_into[a] * sizeof(float));
        all[a] = (struct addition){into[1][a], what[a], n, size, into_stride, what_stride};
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < size; j++)
                into[0][a][i * into_stride + j] += what[a][i * what_stride + j];
    }
    memfit_allow_avx2((int)draw(0, 1));
    memfit_add_all(all, count, (int)draw(1, 5));
    for (int64_t a = 0; a < count; a++) {
        same("additions", into[0][a], into[1][a], (size_t)num_into[a] * sizeof(float));
        free(into[0][a]), free(into[1][a]), free(what[a]);
    }
}

static void try_bernoulli(void) {
    int64_t count = draw(1, 3000), next = draw(0, 624);
    int32_t left = (int32_t)(625 - next);
    uint64_t *generators[2];
    float *out[2];
    for (int k = 0; k < 2; k++) {
        generators[k] = calloc(3 + 624, sizeof(uint64_t));
        memcpy((int32_t *)generators[k] + 2, &left, sizeof left);
        generators[k][2] = (uint64_t)next;
        for (int i = 0; i < 624; i++)
            generators[k][3 + i] = (uint32_t)(i * 2654435761u + (uint32_t)count);
        out[k] = floats(count);
        memfit_allow_avx2(k);
        memfit_bernoulli(generators[k], out[k], count, UINT64_C(1) << 52);
    }
    same("draws", out[0], out[1], (size_t)count * sizeof(float));
    same("generators", generators[0], generators[1], (3 + 624) * sizeof(uint64_t));
    free(generators[0]), free(generators[1]), free(out[0]), free(out[1]);
}

/* One element of a convolution's result, from the products of some channels. */
static float window_sum(const struct convolution *of, int64_t window, int64_t n, int64_t o, int64_t y, int64_t x,
                        int64_t first, int64_t after, float sum) {
    int64_t reach = window / 2, size = of->height * of->width;
    for (int64_t tap = 0; tap < window * window; tap++) {
        int64_t down = tap / window - reach, right = tap % window - reach;
        if (of->is_backward)
            down = -down, right = -right;
        if (y + down < 0 || y + down >= of->height || x + right < 0 || x + right >= of->width)
            continue;
        for (int64_t c = first; c < after; c++) {
            int64_t joint = of->is_backward ? c * of->out_channels + o : o * of->in_channels + c;
            sum = fmaf(of->in[n * of->in_stride + c * size + (y + down) * of->width + x + right],
                       of->weight[joint * window * window + tap], sum);
        }
    }
    return sum;
}

static void plain_convolution(const struct convolution *of, int64_t window, float *out) {
    for (int64_t n = 0; n < of->num_samples; n++)
        for (int64_t o = 0; o < of->out_channels; o++)
            for (int64_t y = 0; y < of->height; y++)
                for (int64_t x = 0; x < of->width; x++, out++)
                    for (int64_t c = 0; c < of->in_channels; c += of->num_summed) {
                        float begin = c == 0 && of->bias && window == 1 ? of->bias[o] : 0;
                        float sum = window_sum(of, window, n, o, y, x, c, least(c + of->num_summed, of->in_channels), begin);
                        if (c == 0 && of->bias && window == 3)
                            sum += of->bias[o];
                        *out = c == 0 ? sum : *out + sum;
                    }
}

static void try_convolution(int64_t window) {
    struct convolution of = {.num_samples = draw(1, 3), .in_channels = draw(1, 40), .out_channels = draw(1, 70),
                             .height = draw(1, 9), .width = draw(2, 33), .is_backward = draw(0, 1),
                             .num_summed = draw(1, 40)};
    of.num_summed = least(of.num_summed, of.in_channels);
    int64_t size = of.height * of.width, num_threads = draw(1, 5);
    of.in_stride = of.in_channels * size + draw(0, 1) * 5;
    int64_t num_in = (of.num_samples - 1) * of.in_stride + of.in_channels * size;
    int64_t num_out = of.num_samples * of.out_channels * size;
    float *in = floats(num_in), *weight = floats(of.in_channels * of.out_channels * window * window);
    float *bias = floats(of.out_channels), *expected = floats(num_out);
    of.in = in, of.weight = weight, of.bias = draw(0, 1) ? bias : NULL, of.out = floats(num_out);
    of.scratch = floats((window == 1 ? memfit_convolve_points_scratch : memfit_convolve_windows_scratch)(&of, num_threads));
    plain_convolution(&of, window, expected);
    (window == 1 ? memfit_convolve_points : memfit_convolve_windows)(&of, (int)num_threads);
    same(of.is_backward ? "gradients of an input" : "a convolution", expected, of.out, (size_t)num_out * sizeof(float));
    free(in), free(weight), free(bias), free(expected), free(of.out), free(of.scratch);
}

/* The sums of one part of the samples, for one weight; where the input is missing, for a bias. */
static float part_sum(const struct convolution_weights *of, int64_t from, int64_t until, const float *in, int64_t o,
                      int64_t down, int64_t right) {
    int64_t size = of->height * of->width;
    float total = 0, sum = 0;
    for (int64_t n = from; n < until; n++)
        for (int64_t k = 0; k < size; k++) {
            int64_t y = k / of->width + down, x = k % of->width + right;
            float grad = of->grad_out[n * of->grad_stride + o * size + k];
            if (in == NULL)
                sum += grad;
            else if (y >= 0 && y < of->height && x >= 0 && x < of->width)
                sum = fmaf(in[n * of->in_stride + y * of->width + x], grad, sum);
            if (in && of->window == 1 && ((k + 1) % of->num_summed == 0 || k + 1 == size)) {
                total = n == from && k < of->num_summed ? sum : total + sum;
                sum = 0;
            }
        }
    return in && of->window == 1 ? total : sum;
}

static float weight_sum(const struct convolution_weights *of, const float *in, int64_t o, int64_t down, int64_t right) {
    float total = 0;
    for (int64_t part = 0, from = 0; part < of->num_parts; part++) {
        int64_t until = from + of->num_samples / of->num_parts + (part < of->num_samples % of->num_parts);
        float sum = part_sum(of, from, until, in, o, down, right);
        total = part == 0 ? sum : total + sum;
        from = until;
    }
    return total;
}

static void try_convolution_weights(int64_t window) {
    struct convolution_weights of = {.num_samples = draw(1, 4), .in_channels = draw(1, 20), .out_channels = draw(1, 70),
                                     .height = draw(1, 9), .width = draw(2, 33), .window = window};
    int64_t size = of.height * of.width, num_threads = draw(1, 5), taps = window * window;
    of.num_parts = draw(1, of.num_samples), of.num_summed = draw(1, size);
    of.in_stride = of.in_channels * size + draw(0, 1) * 3, of.grad_stride = of.out_channels * size + draw(0, 1) * 7;
    float *in = floats((of.num_samples - 1) * of.in_stride + of.in_channels * size);
    float *grad_out = floats((of.num_samples - 1) * of.grad_stride + of.out_channels * size);
    int64_t count = of.out_channels * of.in_channels * taps;
    float *expected = floats(count), *of_bias = floats(of.out_channels), *grad_bias = floats(of.out_channels);
    of.in = in, of.grad_out = grad_out, of.out = floats(count), of.grad_bias = draw(0, 1) ? grad_bias : NULL;
    of.scratch = floats(memfit_convolution_weights_scratch(&of, (int)num_threads));
    for (int64_t k = 0; k < count; k++)
        expected[k] = weight_sum(&of, in + k / taps % of.in_channels * size, k / taps / of.in_channels,
                                 k % taps / window - window / 2, k % window - window / 2);
    for (int64_t o = 0; o < of.out_channels; o++)
        of_bias[o] = weight_sum(&of, NULL, o, 0, 0);
    memfit_convolution_weights(&of, (int)num_threads);
    same("gradients of a weight", expected, of.out, (size_t)count * sizeof(float));
    if (of.grad_bias)
        same("gradients of a bias", of_bias, grad_bias, (size_t)of.out_channels * sizeof(float));
    free(in), free(grad_out), free(expected), free(of_bias), free(grad_bias), free(of.out), free(of.scratch);
}

/* One element, added up in the order that is asked for; operands lie as the kind has them. */
static float sum_of_product(const struct product *of, int64_t row, int64_t column) {
    float total = of->bias ? of->bias[column] : 0;
    for (int64_t k = 0; k < of->num_terms;) {
        float sum = 0;
        for (int64_t end = least(k + of->num_summed, of->num_terms); k < end; k++) {
            int is_turned = of->kind == PRODUCT_OF_FEW_TERMS, has_rows = of->kind == PRODUCT_WITH_ROWS;
            float one = of->one[is_turned ? k * of->num_rows + row : row * of->num_terms + k];
            sum = fmaf(one, of->other[has_rows ? column * of->num_terms + k : k * of->num_columns + column], sum);
        }
        total += sum;
    }
    return total;
}

static void try_product(void) {
    struct product of = {.num_rows = draw(1, 40), .num_columns = draw(1, 600), .num_terms = draw(1, 80),
                         .kind = draw(PRODUCT_WITH_ROWS, PRODUCT_OF_FEW_TERMS)};
    if (draw(1, 20) == 1) /* more than is gone through at once, or a page */
        of.num_columns = draw(1, 30) + (of.kind == PRODUCT_OF_FEW_TERMS ? 1024 : 0), of.num_terms = draw(2040, 2100);
    of.num_summed = of.kind == PRODUCT_OF_FEW_TERMS ? of.num_terms : draw(1, of.num_terms);
    int64_t num_out = of.num_rows * of.num_columns;
    float *one = floats(of.num_rows * of.num_terms), *other = floats(of.num_columns * of.num_terms);
    float *bias = floats(of.num_columns), *expected = floats(num_out);
    of.one = one, of.other = other, of.bias = of.kind == PRODUCT_WITH_ROWS && draw(0, 1) ? bias : NULL;
    of.out = floats(num_out), of.scratch = floats(memfit_multiply_scratch(&of));
    for (int64_t k = 0; k < num_out; k++)
        expected[k] = sum_of_product(&of, k / of.num_columns, k % of.num_columns);
    memfit_multiply(&of, (int)draw(1, 5));
    same("a product", expected, of.out, (size_t)num_out * sizeof(float));
    free(one), free(other), free(bias), free(expected), free(of.out), free(of.scratch);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    state = (uint64_t)atoll(argv[2]);
    for (int round = 0; round < atoi(argv[1]); round++)
        try_batch_norm(0), try_batch_norm(1), try_batch_norm_backward(0), try_batch_norm_backward(1), try_max_pool(),
            try_average_pool(0), try_average_pool(1), try_additions(), try_bernoulli();
    memfit_allow_avx2(1);
    for (int round = 0; memfit_has_avx512() && round < atoi(argv[1]) / 20; round++)
        try_convolution(1), try_convolution(3), try_convolution_weights(1), try_convolution_weights(3),
            try_product(), try_product(), try_product();
    return 0;
}
