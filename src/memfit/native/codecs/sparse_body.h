/* Non-zeros packed one after the other: with a bitmap, or as rows of 256 columns with a byte for each column.
 *
 * Zero is the pattern of all zero bits: -0.0 and NaN are values. numbers = (item bytes, capacity in values).
 * sparse: out (in) is [values: capacity][position of the first value of each block of 256: uint32][bitmap].
 * csr: out (in) is [values: capacity][position behind each row's last value: uint32][column of each value: uint8].
 * Encoders return 0, or more than 0 if the capacity is exceeded; then the code is not to be used. */

static inline uint64_t sparse_item(const char *at, int64_t item) {
    return item == 4 ? load32(at) : item == 2 ? load16(at) : load64(at);
}

static inline void sparse_put(char *at, int64_t item, uint64_t value) {
    if (item == 4)
        store32(at, (uint32_t)value);
    else if (item == 2)
        store16(at, (uint16_t)value);
    else
        store64(at, value);
}

static int64_t sparse_count(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t item = job->numbers[0], count = 0;
    const char *in = job->in;
    if (item == 4)
        for (int64_t i = begin; i < end; i++)
            count += load32(in + 4 * i) != 0;
    else
        for (int64_t i = begin; i < end; i++)
            count += sparse_item(in + item * i, item) != 0;
    return count;
}

#ifdef WITH_AVX2
/* The lanes that a mask selects, moved to the front; and lanes moved from the front to where a mask has them. */
static inline __m256i lanes_out(uint32_t mask) {
    uint64_t wide = _pdep_u64(mask, 0x0101010101010101u) * 0xFF;
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pext_u64(0x0706050403020100u, wide)));
}

static inline __m256i lanes_in(uint32_t mask) {
    uint64_t wide = _pdep_u64(mask, 0x0101010101010101u) * 0xFF;
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pdep_u64(0x0706050403020100u, wide)));
}
#endif

/* The values of up to 64 elements from `in` on go to `position`; returns their bitmap. Room must be there. */
static inline uint64_t sparse_word(const char *in, int64_t count, int64_t item, char *values, int64_t *position) {
    uint64_t map = 0;
    for (int64_t k = 0; k < count; k++) {
        uint64_t value = sparse_item(in + item * k, item);
        if (value) {
            map |= (uint64_t)1 << k;
            sparse_put(values + item * (*position)++, item, value);
        }
    }
    return map;
}

static int64_t sparse_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    int64_t item = job->numbers[0], capacity = job->numbers[1], position = start;
    const char *in = job->in;
    char *values = job->out, *offsets = values + item * capacity;
    uint8_t *bitmap = (uint8_t *)offsets + 4 * ((job->count + BLOCK - 1) / BLOCK);
#ifdef WITH_AVX2
    int64_t room = least(capacity, stop); /* a vector store writes up to seven values too many: not over another's */
#else
    (void)stop;
#endif
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t block = least(BLOCK, end - i);
        store32(offsets + 4 * (i / BLOCK), (uint32_t)position);
        int64_t k = 0;
#ifdef WITH_AVX2
        if (item == 4 && position + BLOCK + 8 <= room) {
            for (; k + 8 <= block; k += 8) {
                __m256i x = _mm256_loadu_si256((const __m256i *)(in + 4 * (i + k)));
                __m256i is_zero = _mm256_cmpeq_epi32(x, _mm256_setzero_si256());
                uint32_t map = ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_zero)) & 0xFF;
                bitmap[(i + k) / 8] = (uint8_t)map;
                _mm256_storeu_si256((__m256i *)(values + 4 * position), _mm256_permutevar8x32_epi32(x, lanes_out(map)));
                position += __builtin_popcount(map);
            }
        }
#endif
        for (; k < block; k += 8) {
            int64_t count = least(8, block - k);
            if (position + count > capacity) { /* count before writing: the last values may just fit */
                int64_t needed = 0;
                for (int64_t m = 0; m < count; m++)
                    needed += sparse_item(in + item * (i + k + m), item) != 0;
                if (position + needed > capacity)
                    return position + needed;
            }
            bitmap[(i + k) / 8] = (uint8_t)sparse_word(in + item * (i + k), count, item, values, &position);
        }
    }
    return 0;
}

static int64_t sparse_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t item = job->numbers[0], capacity = job->numbers[1];
    const char *values = job->in, *offsets = values + item * capacity;
    const uint8_t *bitmap = (const uint8_t *)offsets + 4 * ((job->count + BLOCK - 1) / BLOCK);
    char *out = job->out;
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t block = least(BLOCK, end - i), position = load32(offsets + 4 * (i / BLOCK)), k = 0;
#ifdef WITH_AVX2
        if (item == 4 && position + BLOCK + 8 <= capacity) { /* a vector load reads up to seven values too many */
            for (; k + 8 <= block; k += 8) {
                uint32_t map = bitmap[(i + k) / 8];
                __m256i x = _mm256_loadu_si256((const __m256i *)(values + 4 * position));
                x = _mm256_and_si256(_mm256_permutevar8x32_epi32(x, lanes_in(map)), mask_lanes(map));
                _mm256_storeu_si256((__m256i *)(out + 4 * (i + k)), x);
                position += __builtin_popcount(map);
            }
        }
#endif
        for (; k < block; k++) {
            int64_t is_there = bitmap[(i + k) / 8] >> ((i + k) % 8) & 1;
            uint64_t value = is_there ? sparse_item(values + item * position, item) : 0;
            position += is_there;
            sparse_put(out + item * (i + k), item, value);
        }
    }
    return 0;
}

static int64_t csr_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    int64_t item = job->numbers[0], capacity = job->numbers[1], room = least(capacity, stop), position = start;
    const char *in = job->in;
    char *values = job->out, *rows = values + item * capacity;
    uint8_t *columns = (uint8_t *)rows + 4 * ((job->count + BLOCK - 1) / BLOCK);
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t block = least(BLOCK, end - i);
        if (item == 4 && position + block <= room) {
            /* Without branches: each element is written, and stays only if the position moves on. */
            for (int64_t k = 0; k < block; k++) {
                uint32_t value = load32(in + 4 * (i + k));
                store32(values + 4 * position, value);
                columns[position] = (uint8_t)k;
                position += value != 0;
            }
        } else {
            for (int64_t k = 0; k < block; k++) {
                uint64_t value = sparse_item(in + item * (i + k), item);
                if (!value)
                    continue;
                if (position == capacity)
                    return 1;
                sparse_put(values + item * position, item, value);
                columns[position++] = (uint8_t)k;
            }
        }
        store32(rows + 4 * (i / BLOCK), (uint32_t)position);
    }
    return 0;
}

static int64_t csr_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t item = job->numbers[0], capacity = job->numbers[1];
    const char *values = job->in, *rows = values + item * capacity;
    const uint8_t *columns = (const uint8_t *)rows + 4 * ((job->count + BLOCK - 1) / BLOCK);
    char *out = job->out;
    int64_t position = begin / BLOCK ? (int64_t)load32(rows + 4 * (begin / BLOCK - 1)) : 0;
    memset(out + item * begin, 0, (size_t)(item * (end - begin)));
    for (int64_t i = begin; i < end; i += BLOCK)
        for (int64_t row_end = load32(rows + 4 * (i / BLOCK)); position < row_end; position++)
            sparse_put(out + item * (i + columns[position]), item, sparse_item(values + item * position, item));
    return 0;
}
