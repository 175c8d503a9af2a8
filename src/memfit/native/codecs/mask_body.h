/* Bits: on which side of a gate an element lies, and bools. The first element is in the lowest bits of a byte.
 *
 * mask_pack: numbers = (bits, kind, cells); kind 0 is float32, 1 is bfloat16; reals holds (low, high, class) for each
 * cell. The first cell that fits decides; what fits none, NaN always, is of class 0.
 * mask_unpack: numbers = (bits, item bytes, the pattern of each of four classes).
 * mask_gate: out is the gradient in2 with zeros where the bit is set; without in2 it is changed in place. numbers = (1,
 * item bytes). */

static inline float mask_item(const struct job *job, int64_t i) {
    if (job->numbers[1] == 0)
        return load_float((const char *)job->in + 4 * i);
    return float_of((uint32_t)load16((const char *)job->in + 2 * i) << 16);
}

static inline uint32_t mask_class(const struct job *job, float x) {
    const float *cell = job->reals;
    for (int64_t c = 0; c < job->numbers[2]; c++, cell += 3)
        if (x >= cell[0] && x <= cell[1])
            return (uint32_t)cell[2];
    return 0;
}

#ifdef WITH_AVX2
static inline __m256 mask_items8(const struct job *job, int64_t i) {
    if (job->numbers[1] == 0)
        return _mm256_loadu_ps((const float *)job->in + i);
    __m128i half = _mm_loadu_si128((const __m128i *)((const char *)job->in + 2 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Bit k of x to bit 2k. */
static inline uint32_t spread(uint32_t x) { return _pdep_u32(x, 0x5555); }

static inline __m256i mask_lanes(uint32_t byte) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)byte), each), each);
}
#endif

static int64_t mask_pack(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t bits = job->numbers[0], i = begin;
    uint8_t *out = (uint8_t *)job->out + begin * bits / 8;
#ifdef WITH_AVX2
    int64_t num_cells = job->numbers[2];
    const float *cells = job->reals;
    if (bits == 1 && job->numbers[1] == 0 && num_cells == 1 && cells[0] == -__builtin_inff() && cells[2] == 1) {
        /* ReLU's gate, one comparison. */
        __m256 high = _mm256_set1_ps(cells[1]);
        const float *in = job->in;
        for (; i + 32 <= end; i += 32, out += 4) {
            uint32_t word = 0;
            for (int k = 0; k < 4; k++)
                word |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(in + i + 8 * k), high, _CMP_LE_OQ))
                        << (8 * k);
            store32(out, word);
        }
    }
    for (; i + 8 <= end; i += 8) {
        __m256 x = mask_items8(job, i), bit0 = _mm256_setzero_ps(), bit1 = _mm256_setzero_ps();
        for (int64_t c = num_cells - 1; c >= 0; c--) { /* the first that fits wins, so it is written last */
            const float *cell = cells + 3 * c;
            __m256 inside = _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(cell[0]), _CMP_GE_OQ),
                                          _mm256_cmp_ps(x, _mm256_set1_ps(cell[1]), _CMP_LE_OQ));
            uint32_t class = (uint32_t)cell[2];
            bit0 = class & 1 ? _mm256_or_ps(bit0, inside) : _mm256_andnot_ps(inside, bit0);
            bit1 = class & 2 ? _mm256_or_ps(bit1, inside) : _mm256_andnot_ps(inside, bit1);
        }
        uint32_t low = (uint32_t)_mm256_movemask_ps(bit0);
        if (bits == 1) {
            *out++ = (uint8_t)low;
        } else {
            store16(out, (uint16_t)(spread(low) | spread((uint32_t)_mm256_movemask_ps(bit1)) << 1));
            out += 2;
        }
    }
#endif
    for (int64_t per_byte = 8 / bits; i < end; i += per_byte) {
        uint32_t byte = 0;
        for (int64_t k = 0; k < least(per_byte, end - i); k++)
            byte |= mask_class(job, mask_item(job, i + k)) << (k * bits);
        *out++ = (uint8_t)byte;
    }
    return 0;
}

static int64_t mask_pack_bool(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const uint8_t *in = job->in;
    uint8_t *out = (uint8_t *)job->out + begin / 8;
    int64_t i = begin;
#ifdef WITH_AVX2
    for (; i + 32 <= end; i += 32, out += 4) {
        __m256i is_zero = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(in + i)), _mm256_setzero_si256());
        store32(out, ~(uint32_t)_mm256_movemask_epi8(is_zero));
    }
#endif
    for (; i < end; i += 8) {
        uint32_t byte = 0;
        for (int64_t k = 0; k < least(8, end - i); k++)
            byte |= (uint32_t)(in[i + k] != 0) << k;
        *out++ = (uint8_t)byte;
    }
    return 0;
}

static inline void mask_put(char *out, int64_t i, int64_t item, uint64_t pattern) {
    switch (item) {
    case 1: ((uint8_t *)out)[i] = (uint8_t)pattern; break;
    case 2: store16(out + 2 * i, (uint16_t)pattern); break;
    case 4: store32(out + 4 * i, (uint32_t)pattern); break;
    default: store64(out + 8 * i, pattern);
    }
}

static int64_t mask_unpack(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t bits = job->numbers[0], item = job->numbers[1], i = begin, per_byte = 8 / bits;
    const int64_t *patterns = job->numbers + 2;
    const uint8_t *in = (const uint8_t *)job->in + begin * bits / 8;
    char *out = job->out;
#ifdef WITH_AVX2
    if (bits == 1 && item == 4) {
        __m256i clear = _mm256_set1_epi32((int)patterns[0]), set = _mm256_set1_epi32((int)patterns[1]);
        for (; i + 8 <= end; i += 8)
            _mm256_storeu_si256((__m256i *)(out + 4 * i), _mm256_blendv_epi8(clear, set, mask_lanes(*in++)));
    } else if (bits == 1 && item == 1 && patterns[0] == 0 && patterns[1] == 1) {
        for (; i + 8 <= end; i += 8)
            store64(out + i, _pdep_u64(*in++, 0x0101010101010101u));
    } else if (bits == 2 && item == 4) {
        const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
        __m256 table = _mm256_castsi256_ps(_mm256_setr_epi32((int)patterns[0], (int)patterns[1], (int)patterns[2],
                                                             (int)patterns[3], 0, 0, 0, 0));
        for (; i + 8 <= end; i += 8, in += 2) {
            __m256i class = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(load16(in)), shifts),
                                             _mm256_set1_epi32(3));
            _mm256_storeu_ps((float *)out + i, _mm256_permutevar8x32_ps(table, class));
        }
    }
#endif
    for (; i < end; i += per_byte) {
        uint32_t byte = *in++;
        for (int64_t k = 0; k < least(per_byte, end - i); k++)
            mask_put(out, i + k, item, (uint64_t)patterns[byte >> (k * bits) & ((1u << bits) - 1)]);
    }
    return 0;
}

static int64_t mask_gate(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    int64_t item = job->numbers[1], i = begin;
    const uint8_t *in = (const uint8_t *)job->in + begin / 8;
    char *out = job->out;
    const char *gradient = job->in2 ? job->in2 : out;
#ifdef WITH_AVX2
    if (item == 4) {
        for (; i + 8 <= end; i += 8) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(gradient + 4 * i));
            _mm256_storeu_si256((__m256i *)(out + 4 * i), _mm256_andnot_si256(mask_lanes(*in++), x));
        }
    }
#endif
    for (; i < end; i += 8) {
        uint32_t byte = *in++;
        int64_t count = least(8, end - i);
        if (job->in2)
            memcpy(out + item * i, gradient + item * i, (size_t)(item * count));
        for (int64_t k = 0; k < count; k++)
            if (byte >> k & 1)
                mask_put(out, i + k, item, 0);
    }
    return 0;
}
