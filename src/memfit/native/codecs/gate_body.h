/* threshold_backward on a code that holds values: decode a stretch into scratch, and let the gradient through by it.
 *
 * in: the code; in2: the gradient; out: where the gradient goes behind the gate, which may be the gradient itself.
 * numbers = (the kernel that decodes, then that kernel's own numbers); reals = (the threshold). float32 only. */

enum { STRETCH = 4 * GRAIN };

extern kernel *const NAME(memfit, kernels)[NUM_KERNELS];

static int64_t code_gate(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    kernel *decode = NAME(memfit, kernels)[job->numbers[0]];
    const char *gradient = job->in2;
    char *gated = job->out;
    float threshold = job->reals[0];
    float scratch[STRETCH];
    for (int64_t at = begin; at < end; at += STRETCH) {
        int64_t stretch_end = least(at + STRETCH, end);
        /* Kernels write element n to out + 4 n: so that the stretch begins where the scratch does. */
        void *shifted = (void *)((uintptr_t)scratch - (uintptr_t)(4 * at));
        struct job part = {job->in, NULL, shifted, job->count, job->numbers + 1, NULL};
        int64_t problem = decode(&part, at, stretch_end, 0, INT64_MAX);
        if (problem)
            return problem;
        int64_t k = 0;
#ifdef WITH_AVX2
        for (; k + 8 <= stretch_end - at; k += 8) {
            __m256 is_open = _mm256_cmp_ps(_mm256_loadu_ps(scratch + k), _mm256_set1_ps(threshold), _CMP_NLE_UQ);
            __m256 passed = _mm256_loadu_ps((const float *)(gradient + 4 * (at + k)));
            _mm256_storeu_ps((float *)(gated + 4 * (at + k)), _mm256_and_ps(is_open, passed));
        }
#endif
        for (; k < stretch_end - at; k++) {
            uint32_t passed = load32(gradient + 4 * (at + k));
            store32(gated + 4 * (at + k), scratch[k] <= threshold ? 0 : passed); /* NaN passes */
        }
    }
    return 0;
}
