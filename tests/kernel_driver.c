/* Calls every stand-in on random tensors in buffers of just their size, for the sanitizers to watch.
 *
 * With and without AVX2 the results must be the same. Sizes, settings and numbers of threads are random. Usage:
 * kernel_driver ROUNDS SEED. Exits with 1 and a line of text at the first disagreement. */
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
        printf("%s: with AVX2 the result is another one\n", what);
        exit(1);
    }
}

static void try_batch_norm(int has_rows) {
    int64_t n = draw(1, 4), c = draw(1, 70), size = draw(2, 60), all = n * c * size;
    int64_t num_parts = draw(1, 5);
    float *in = floats(all), *weight = floats(c), *bias = floats(c), *vectors[2][4], *out[2];
    for (int k = 0; k < 2; k++) {
        out[k] = floats(all);
        for (int v = 0; v < 4; v++)
            vectors[k][v] = calloc((size_t)c, sizeof(float));
        memfit_allow_avx2(k);
        struct batch_norm of = {in, weight, bias, vectors[k][0], vectors[k][1], out[k], vectors[k][2], vectors[k][3],
                                0.1, 1e-5, n, c, size, num_parts};
        (has_rows ? memfit_batch_norm_rows : memfit_batch_norm)(&of, (int)draw(1, 5));
    }
    same("batch norm", out[0], out[1], (size_t)all * sizeof(float));
    for (int v = 0; v < 4; v++) {
        same("statistics", vectors[0][v], vectors[1][v], (size_t)c * sizeof(float));
        free(vectors[0][v]), free(vectors[1][v]);
    }
    free(in), free(weight), free(bias), free(out[0]), free(out[1]);
}

static void try_batch_norm_backward(void) {
    int64_t c = draw(1, 70), num_rows = draw(2, 200), all = c * num_rows, num_parts = draw(1, 5);
    int is_gated = (int)draw(0, 1);
    float *grad = floats(all), *in = floats(all), *gate = floats(all), *given[3], *grads[2], *out[2], *vectors[2][2];
    for (int v = 0; v < 3; v++)
        given[v] = floats(c);
    for (int k = 0; k < 2; k++) {
        out[k] = floats(all), vectors[k][0] = floats(c), vectors[k][1] = floats(c), grads[k] = floats(all);
        memcpy(grads[k], grad, (size_t)all * sizeof(float));
        memfit_allow_avx2(k);
        struct batch_norm_backward of = {grads[k], in, given[0], given[1], given[2], NULL, NULL, out[k], vectors[k][0],
                                         vectors[k][1], num_rows, c, num_parts};
        if (is_gated) {
            of.gate = gate, of.sums = floats(2 * c);
            memfit_batch_norm_rows_sums(&of, (int)draw(1, 5));
        }
        memfit_batch_norm_rows_backward(&of, (int)draw(1, 5));
        free(of.sums);
    }
    same("gradients behind the gate", grads[0], grads[1], (size_t)all * sizeof(float));
    same("gradients of batch norm", out[0], out[1], (size_t)all * sizeof(float));
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

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    state = (uint64_t)atoll(argv[2]);
    for (int round = 0; round < atoi(argv[1]); round++)
        try_batch_norm(0), try_batch_norm(1), try_batch_norm_backward(), try_max_pool(), try_bernoulli();
    return 0;
}
