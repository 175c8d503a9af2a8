/* The gradient of a max pooling's input, from the slots of its windows.
 *
 * in is the code that window_pack made, in2 the gradient of the output, out that of the input; both gradients are in
 * the code's order (outer, windows, inner). count is the number of planes, outer times inner: shares are ranges of
 * planes, no two of which meet in one element. numbers = (bits, out depth, out height, out width, inner, item bytes,
 * elements of a plane of the input, slots, stride along a row or 0 if it is uneven), then the starts of the windows
 * along each dimension, then the distance of each number that a slot's bits can be.
 * An element's sum is over its windows in their order, as torch's own kernel has it: the same to the last bit. A
 * damaged code gives wrong numbers, but nothing is ever written outside the planes of a share. */

/* All of it is inlined, so that the compiler can tell the geometry, on the stack, from what is written to. */
#define INLINE static inline __attribute__((always_inline))

enum { MOST_SLOTS = 16 /* with vectors: every one of them is tried */ };

struct pooling {
    int64_t bits, depth, height, width, inner, item, plane, num_slots, stride;
    const int64_t *layers, *rows, *columns, *distances;
    const uint8_t *code;
    int64_t code_bytes;
    const char *gradient;
};

static inline struct pooling pooling_of(const struct job *job) {
    const int64_t *n = job->numbers, *layers = n + 9, *rows = layers + n[1], *columns = rows + n[2];
    struct pooling pool = {.bits = n[0], .depth = n[1], .height = n[2], .width = n[3], .inner = n[4], .item = n[5]};
    pool.plane = n[6], pool.num_slots = n[7], pool.stride = n[8];
    pool.layers = layers, pool.rows = rows, pool.columns = columns, pool.distances = columns + n[3];
    pool.code = job->in, pool.code_bytes = (job->count * n[1] * n[2] * n[3] * n[0] + 7) / 8;
    pool.gradient = job->in2;
    return pool;
}

INLINE void window_add(char *at, const char *gradient, int64_t item) {
    if (item == 4) {
        store_float(at, load_float(at) + load_float(gradient));
    } else {
        double sum, more;
        memcpy(&sum, at, 8), memcpy(&more, gradient, 8);
        sum += more;
        memcpy(at, &sum, 8);
    }
}

/* The bits of at least eight slots from an element on, the first lowest; zeros behind the end of the code. */
INLINE uint64_t eight_slots(const struct pooling *pool, int64_t bits, int64_t element) {
    int64_t byte = element * bits >> 3, left = pool->code_bytes - byte;
    uint64_t word = 0;
    if (left >= 8)
        word = load64(pool->code + byte);
    else
        memcpy(&word, pool->code + byte, (size_t)left);
    return word >> (element * bits & 7);
}

/* One window after the other: of a row if `step` is 1, else the planes of one window, which begin side by side. */
INLINE void window_run(const struct pooling *pool, const int64_t *starts, int64_t step, int64_t base, int64_t element,
                       int64_t count, char *out, int64_t item) {
    const char *gradient = pool->gradient + element * item;
    uint64_t mask = ((uint64_t)1 << pool->bits) - 1;
    for (int64_t k = 0; k < count;) {
        uint64_t slots = eight_slots(pool, pool->bits, element + k);
        for (int64_t stop = least(count, k + 8); k < stop; k++, slots >>= pool->bits) {
            int64_t index = base + starts[step * k] + pool->distances[slots & mask];
            if ((uint64_t)index < (uint64_t)pool->plane)
                window_add(out + (step ? index : index * pool->inner + k) * item, gradient + k * item, item);
        }
    }
}

/* A row of windows that lie evenly and all inside the plane; the first begins at `out`. */
INLINE void window_row(const struct pooling *pool, int64_t bits, int64_t stride, int64_t element, char *out,
                       int64_t item) {
    const char *gradient = pool->gradient + element * item;
    const int64_t *distances = pool->distances;
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    int64_t c = 0;
    for (; c + 8 <= pool->width; c += 8, out += 8 * stride * item, gradient += 8 * item) {
        uint64_t slots = eight_slots(pool, bits, element + c);
        for (int64_t k = 0; k < 8; k++)
            window_add(out + (k * stride + distances[slots >> k * bits & mask]) * item, gradient + k * item, item);
    }
    if (c == pool->width)
        return;
    uint64_t slots = eight_slots(pool, bits, element + c);
    for (; c < pool->width; c++, slots >>= bits, out += stride * item, gradient += item)
        window_add(out + distances[slots & mask] * item, gradient, item);
}

#ifdef WITH_AVX2
INLINE __m256i slots_of(uint64_t word, int64_t bits) {
    __m256i shifts = bits == 4 ? _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)
                               : _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)word), shifts), _mm256_set1_epi32((1 << bits) - 1));
}

/* Planes [first, last) of one window, eight at a time; returns where it stopped. Each slot gets the gradients of those
 * planes that have it, and zeros of the others: a sum never is -0.0, so that zeros do not change it. */
INLINE int64_t window_planes8(const struct pooling *pool, const int64_t *offsets, int64_t window, int64_t element,
                              int64_t first, int64_t last, int64_t bits, int64_t num_slots, char *out) {
    int64_t c = first, inner = pool->inner;
    if (window < 0 || window * inner + offsets[num_slots - 1] >= pool->plane * inner)
        return c;
    for (; c + 8 <= last; c += 8) {
        char *begin = out + 4 * (window * inner + c);
        __m256i slots = slots_of(eight_slots(pool, bits, element + c), bits);
        __m256 gradients = _mm256_loadu_ps((const float *)(pool->gradient + 4 * (element + c)));
        for (int64_t slot = 0; slot < num_slots; slot++) {
            float *at = (float *)(begin + 4 * offsets[slot]);
            __m256i has_it = _mm256_cmpeq_epi32(slots, _mm256_set1_epi32((int)slot));
            __m256 more = _mm256_and_ps(gradients, _mm256_castsi256_ps(has_it));
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), more));
        }
    }
    return c;
}
#endif

/* Planes [first, last) of one outer index: the one there is if inner is 1, else a range of those side by side. */
INLINE void window_planes(const struct pooling *pool, char *all, int64_t outer, int64_t first, int64_t last,
                          int64_t item) {
    int64_t inner = pool->inner, width = pool->width, num_rows = pool->depth * pool->height;
    int64_t reach = pool->distances[pool->num_slots - 1] + (width - 1) * pool->stride;
    char *out = all + outer * pool->plane * inner * item;
#ifdef WITH_AVX2
    int has_vectors = item == 4 && pool->bits < 8 && pool->num_slots <= MOST_SLOTS;
    int64_t offsets[MOST_SLOTS];
    for (int64_t slot = 0; has_vectors && slot < pool->num_slots; slot++)
        offsets[slot] = pool->distances[slot] * inner;
#endif
    if (last - first == inner)
        memset(out, 0, (size_t)(pool->plane * inner * item));
    else
        for (int64_t k = 0; k < pool->plane; k++)
            memset(out + (k * inner + first) * item, 0, (size_t)((last - first) * item));
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t base = pool->layers[row / pool->height] + pool->rows[row % pool->height];
        int64_t element = (outer * num_rows + row) * width * inner, start = base + pool->columns[0];
        if (inner == 1) {
            if (!pool->stride || start < 0 || start + reach >= pool->plane)
                window_run(pool, pool->columns, 1, base, element, width, out, item);
            else if (pool->stride == 2 && pool->bits == 2)
                window_row(pool, 2, 2, element, out + start * item, item);
            else if (pool->stride == 2 && pool->bits == 4)
                window_row(pool, 4, 2, element, out + start * item, item);
            else
                window_row(pool, pool->bits, pool->stride, element, out + start * item, item);
            continue;
        }
        for (int64_t c = 0; c < width; c++, element += inner) {
            int64_t begin = first;
#ifdef WITH_AVX2
            int64_t window = base + pool->columns[c], num_slots = pool->num_slots;
            if (has_vectors && pool->bits == 2 && num_slots == 4)
                begin = window_planes8(pool, offsets, window, element, first, last, 2, 4, out);
            else if (has_vectors && pool->bits == 4 && num_slots == 9)
                begin = window_planes8(pool, offsets, window, element, first, last, 4, 9, out);
            else if (has_vectors)
                begin = window_planes8(pool, offsets, window, element, first, last, pool->bits, num_slots, out);
#endif
            window_run(pool, pool->columns + c, 0, base, element + begin, last - begin, out + begin * item, item);
        }
    }
}

static int64_t window_backward(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    struct pooling pool = pooling_of(job);
    if (!pool.width)
        return 0;
    for (int64_t at = begin, next; at < end; at = next) {
        int64_t outer = at / pool.inner, first = at - outer * pool.inner;
        next = least(end, (outer + 1) * pool.inner);
        if (pool.item == 4)
            window_planes(&pool, job->out, outer, first, first + next - at, 4);
        else
            window_planes(&pool, job->out, outer, first, first + next - at, 8);
    }
    return 0;
}

#undef INLINE
