/* Kernels that do what some of torch's do on a CPU, to the bit, in less time: what every file here shares.
 *
 * Each says in which order torch adds, what it holds in double precision, and where it rounds: that is all there is to
 * keep. The caller sees to layouts. Whether the bits are torch's is asked of every machine, shape by shape
 * (memfit/capture/rewrites/stand_ins.py). */
#ifndef MEMFIT_KERNELS_H
#define MEMFIT_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "../team/team.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define MEMFIT_FOR_AVX2 1
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2,fma")))
#define WITH_AVX512 __attribute__((target("avx512f,fma")))
#endif

/* Some channels of a map that lie elsewhere than the others. */
struct channels {
    const float *in;
    int64_t stride; /* from one sample to the next */
    int64_t num_channels;
};

struct batch_norm {
    const float *in, *weight, *bias; /* weight and bias may be missing */
    float *running_mean, *running_var; /* may be missing */
    float *out, *save_mean, *save_invstd;
    double momentum, eps;
    int64_t num_samples, num_channels, image_size;
    int64_t num_parts; /* channels last: in how many parts rows are added up, as many as torch has threads */
    int64_t is_rectified; /* what is negative becomes zero, as a ReLU behind it would have it */
    const struct channels *pieces; /* channels first: instead of `in`, which may be missing */
    float *whole; /* what the pieces are together; may be missing */
};

struct batch_norm_backward {
    float *grad_out; /* with a gate, it counts as zero where the gate is not positive; of rows it is written back so */
    const float *in, *weight, *mean, *invstd;
    const float *gate; /* may be missing */
    float *grad_in, *grad_weight, *grad_bias;
    int64_t num_samples, num_channels, image_size;
    int64_t num_parts; /* of rows, channels last */
};

struct max_pool {
    const float *in;
    float *out;
    int64_t *indices;
    int64_t num_planes, in_height, in_width, out_height, out_width;
    int64_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
    int64_t dilation_height, dilation_width;
};

struct average_pool {
    const float *in; /* backward, the gradient of the output */
    float *out; /* backward, that of the input */
    int64_t num_planes, in_height, in_width, out_height, out_width; /* of the op: backward, out has the input's sizes */
    int64_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
    int64_t counts_padding; /* zeros around the map count as elements of a window */
    int64_t divisor; /* what sums are divided by; if it is 0, the number of elements */
};

/* One map of an addition in place, and what is added to it: samples in one piece each, of so many elements. */
struct addition {
    float *into;
    const float *what;
    int64_t num_samples, size, into_stride, what_stride;
};

/* A convolution with a window of one element, or of three by three with zeros around; it moves by one. */
struct convolution {
    const float *in, *weight, *bias; /* bias may be missing */
    float *out, *scratch;
    int64_t in_stride; /* from one sample to the next */
    int64_t num_samples, in_channels, out_channels, height, width;
    int64_t is_backward; /* in is the gradient of the output, and out that of the input */
    int64_t num_summed; /* products of so many channels are added up by themselves */
};

struct convolution_weights { /* the gradient of its weight */
    const float *in, *grad_out;
    float *out, *grad_bias, *scratch; /* grad_bias may be missing */
    int64_t in_stride, grad_stride; /* from one sample to the next */
    int64_t num_samples, in_channels, out_channels, height, width, window;
    int64_t num_parts; /* of the samples, each added up by itself */
    int64_t num_summed; /* with windows of one, products of so many elements are added up by themselves */
};

/* A product of matrices in rows one after the other, whose result has few rows or whose sums have few terms. */
enum {
    PRODUCT_WITH_ROWS, /* other has a row for each column of the result */
    PRODUCT_WITH_COLUMNS, /* other has a row for each term */
    PRODUCT_OF_FEW_TERMS /* so has one */
};

struct product {
    const float *one, *other, *bias; /* with a number for each column; may be missing */
    float *out, *scratch;
    int64_t num_rows, num_columns, num_terms; /* of the result, and of its sums */
    int64_t num_summed; /* products of so many terms are added up by themselves */
    int64_t kind;
};

void memfit_batch_norm(const struct batch_norm *of, int num_threads);
void memfit_batch_norm_rows(const struct batch_norm *of, int num_threads); /* channels last */

/* The result once more, from the statistics that were saved. */
void memfit_renormalise(const struct batch_norm *of, int num_threads);
void memfit_renormalise_rows(const struct batch_norm *of, int num_threads); /* channels last */

/* Its backward, and with a gate that of the ReLU behind it; the result may overwrite the gradient. With channels first
 * maps have 8 elements at least. */
void memfit_batch_norm_backward(const struct batch_norm_backward *of, int num_threads);
void memfit_batch_norm_rows_backward(const struct batch_norm_backward *of, int num_threads); /* channels last */

void memfit_max_pool(const struct max_pool *of, int num_threads);

/* No window may be outside its map, which torch sees to; backward, no two may overlap. */
void memfit_average_pool(const struct average_pool *of, int num_threads);
void memfit_average_pool_backward(const struct average_pool *of, int num_threads);

void memfit_add_all(const struct addition *all, int64_t count, int num_threads);

/* Convolutions with windows of one element, and of three by three; and how many floats of scratch they ask for. They must
 * not be called where memfit_has_avx512() says no. */
void memfit_convolve_points(const struct convolution *of, int num_threads);
void memfit_convolve_windows(const struct convolution *of, int num_threads);
void memfit_convolution_weights(const struct convolution_weights *of, int num_threads);
int64_t memfit_convolve_points_scratch(const struct convolution *of, int num_threads);
int64_t memfit_convolve_windows_scratch(const struct convolution *of, int num_threads);
int64_t memfit_convolution_weights_scratch(const struct convolution_weights *of, int num_threads);

/* Likewise. The bias is for products with rows only. */
void memfit_multiply(const struct product *of, int num_threads);
int64_t memfit_multiply_scratch(const struct product *of);

/* What torch does with the sums of one channel. */
void memfit_finish_channel(const struct batch_norm *of, int64_t channel, float mean, double squares);

/* What the elements of a channel are multiplied by, and what is added. */
void memfit_line_of(const struct batch_norm *of, int64_t channel, float *alpha, float *beta);

/* Ones where a number of 53 bits is below that; the generator is left where torch would leave it. */
void memfit_bernoulli(void *generator, float *out, int64_t count, uint64_t below);

/* For tests: the kernels for any machine must give the same bits. */
void memfit_allow_avx2(int is_allowed);

/* Whether this machine has AVX2 and FMA, and nobody said to do without. */
int memfit_has_avx2(void);

/* The same for AVX-512. */
int memfit_has_avx512(void);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* What is no number stays what it is, and so does a negative zero. */
static inline float no_less(float x, float lowest) { return x < lowest ? lowest : x; }

static inline float lowest_of(const struct batch_norm *of) { return of->is_rectified ? 0 : -INFINITY; }

#endif
