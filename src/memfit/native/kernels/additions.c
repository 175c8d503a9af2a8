/* Many additions of float32 maps in place, at once.
 *
 * Where a map is read by many, as in a dense block, backward adds up as many gradients, each by an op of its own that is
 * too small for torch to share out. Here the elements of all of them are shared out as if they followed each other. */
#include "kernels.h"

struct additions {
    const struct addition *all;
    int64_t count;
};

static void plain_add(float *into, const float *what, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        into[i] += what[i];
}

#ifdef MEMFIT_FOR_AVX2
WITH_AVX2 static void avx2_add(float *into, const float *what, int64_t size) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm256_storeu_ps(into + i, _mm256_add_ps(_mm256_loadu_ps(into + i), _mm256_loadu_ps(what + i)));
    for (; i < size; i++)
        into[i] += what[i];
}
#endif

static void add_range(void *given, int64_t begin, int64_t end) {
    const struct additions *additions = given;
    void (*add)(float *, const float *, int64_t) = plain_add;
#ifdef MEMFIT_FOR_AVX2
    if (memfit_has_avx2())
        add = avx2_add;
#endif
    int64_t at = 0; /* where the next map begins among all elements */
    for (int64_t a = 0; a < additions->count && at < end; a++) {
        const struct addition *of = &additions->all[a];
        for (int64_t n = 0; n < of->num_samples && at < end; n++, at += of->size) {
            int64_t first = begin > at ? begin - at : 0, last = least(end - at, of->size);
            if (first < last)
                add(of->into + n * of->into_stride + first, of->what + n * of->what_stride + first, last - first);
        }
    }
}

void memfit_add_all(const struct addition *all, int64_t count, int num_threads) {
    enum { VECTOR = 16 };
    struct additions additions = {all, count};
    int64_t num_elements = 0;
    for (int64_t a = 0; a < count; a++)
        num_elements += all[a].num_samples * all[a].size;
    memfit_share_out(add_range, &additions, num_elements, VECTOR, num_threads);
}
