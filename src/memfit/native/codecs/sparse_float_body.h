/* Non-zeros packed with a bitmap, their values as small floats, one block of 256 elements after the other.
 *
 * numbers = (keeps_gate, capacity in bytes, format: one of enum value_format).
 * out (in) is [codes of the values: capacity][where the codes of each block begin, in bytes: uint32][bitmap].
 * The codes of a block are what the dense kernel makes of a tensor of its values alone: for fp8 a step and a byte for
 * each value, and nothing if there are none; fp10 has one run of w words for a block's values, word j the values j,
 * j + w and j + 2 w. So blocks do not depend on one another, and between tensor and code there is one block in a
 * scratch. The encoder returns 0, or more than 0 if the capacity is exceeded or a value has no code. */

enum value_format { AS_FP16, AS_BF16, AS_FP10, AS_FP8 };

static inline int64_t value_bytes(int64_t format, int64_t num_values) {
    switch (format) {
    case AS_FP10: return 4 * ((num_values + 2) / 3);
    case AS_FP8: return num_values ? 4 + num_values : 0;
    default: return 2 * num_values;
    }
}

/* The number of values, in a scratch with room for eight more than a block; their bitmap goes where it belongs. */
static inline int64_t compacted(const char *in, int64_t count, float *values, uint8_t *bitmap) {
    int64_t num_values = 0, k = 0;
#ifdef WITH_AVX2
    for (; k + 8 <= count; k += 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(in + 4 * k));
        __m256i is_zero = _mm256_cmpeq_epi32(x, _mm256_setzero_si256());
        uint32_t map = ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_zero)) & 0xFF;
        bitmap[k / 8] = (uint8_t)map;
        _mm256_storeu_si256((__m256i *)(values + num_values), _mm256_permutevar8x32_epi32(x, lanes_out(map)));
        num_values += __builtin_popcount(map);
    }
#endif
    for (; k < count; k += 8) {
        uint32_t map = 0;
        for (int64_t m = 0; m < least(8, count - k); m++) {
            /* Without branches: each element is written, and stays only if the number moves on. */
            uint32_t bits = load32(in + 4 * (k + m));
            store32(values + num_values, bits);
            map |= (uint32_t)(bits != 0) << m;
            num_values += bits != 0;
        }
        bitmap[k / 8] = (uint8_t)map;
    }
    return num_values;
}

static inline void expanded(const float *values, const uint8_t *bitmap, int64_t count, char *out) {
    int64_t k = 0;
#ifdef WITH_AVX2
    for (; k + 8 <= count; k += 8) {
        uint32_t map = bitmap[k / 8];
        __m256i x = _mm256_loadu_si256((const __m256i *)values);
        x = _mm256_and_si256(_mm256_permutevar8x32_epi32(x, lanes_in(map)), mask_lanes(map));
        _mm256_storeu_si256((__m256i *)(out + 4 * k), x);
        values += __builtin_popcount(map);
    }
#endif
    for (; k < count; k++) {
        uint32_t is_there = bitmap[k / 8] >> (k % 8) & 1;
        store32(out + 4 * k, bits_of(*values) & (uint32_t) - (int32_t)is_there);
        values += is_there;
    }
}

static inline int64_t bits_set(const uint8_t *bitmap, int64_t count) {
    int64_t found = 0, k = 0;
    for (; k + 64 <= count; k += 64)
        found += __builtin_popcountll(load64(bitmap + k / 8));
    for (; k < count; k += 8)
        found += __builtin_popcount(bitmap[k / 8]);
    return found;
}

static int64_t sparse_float_count(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *in = job->in;
    int64_t total = 0;
    for (int64_t i = begin; i < end; i += BLOCK) {
        int32_t num_values = 0;
        for (int64_t k = i; k < least(end, i + BLOCK); k++)
            num_values += load32(in + 4 * k) != 0;
        total += value_bytes(job->numbers[2], num_values);
    }
    return total;
}

static int64_t sparse_float_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)stop;
    int64_t capacity = job->numbers[1], format = job->numbers[2], position = start, strange = 0;
    char *codes = job->out, *offsets = codes + capacity;
    uint8_t *bitmap = (uint8_t *)offsets + 4 * ((job->count + BLOCK - 1) / BLOCK);
    float values[BLOCK + 8];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const char *in = (const char *)job->in + 4 * i;
        int64_t num_values = compacted(in, least(BLOCK, end - i), values, bitmap + i / 8);
        int64_t bytes = value_bytes(format, num_values);
        if (position + bytes > capacity)
            return 1;
        store32(offsets + 4 * (i / BLOCK), (uint32_t)position);
        struct job block = {values, NULL, codes + position, num_values, job->numbers, NULL};
        switch (format) {
        case AS_FP16: fp16_encode(&block, 0, num_values, 0, 0); break;
        case AS_BF16: bf16_encode(&block, 0, num_values, 0, 0); break;
        case AS_FP10:
            values[num_values] = values[num_values + 1] = 0; /* three to every word */
            fp10_words(block.in, block.out, bytes / 4 * 3, bytes / 4, (uint32_t)job->numbers[0]);
            break;
        default: strange += fp8_encode(&block, 0, num_values, 0, 0);
        }
        position += bytes;
    }
    return strange;
}

static int64_t sparse_float_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t capacity = job->numbers[1], format = job->numbers[2];
    const char *codes = job->in, *offsets = codes + capacity;
    const uint8_t *bitmap = (const uint8_t *)offsets + 4 * ((job->count + BLOCK - 1) / BLOCK);
    float values[BLOCK + 8] = {0};
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t count = least(BLOCK, end - i), num_values = bits_set(bitmap + i / 8, count);
        const char *at = codes + load32(offsets + 4 * (i / BLOCK));
        struct job block = {at, NULL, values, num_values, job->numbers, NULL};
        switch (format) {
        case AS_FP16: fp16_decode(&block, 0, num_values, 0, 0); break;
        case AS_BF16: bf16_decode(&block, 0, num_values, 0, 0); break;
        case AS_FP10: fp10_numbers(at, block.out, value_bytes(format, num_values) / 4 * 3, (num_values + 2) / 3); break;
        default: fp8_decode(&block, 0, num_values, 0, 0);
        }
        expanded(values, bitmap + i / 8, count, (char *)job->out + 4 * i);
    }
    return 0;
}
