/* Small floats: sign, exponent, mantissa, with subnormals, rounded to nearest even.
 *
 * Finite numbers that are too large become the largest. NaN has one pattern. With `keeps_gate` (numbers[0]) what is not
 * zero stays so: what would round to zero becomes the smallest number of its sign.
 * fp16, bf16: 16 bits each.
 * fp10: three to a word of 32 bits; eight words hold 24 elements, word j the elements j, j + 8 and j + 16; the last
 * words hold what is left in the same way.
 * fp8: [step of each block of 256: float32][codes]; a step is a power of two. The encoder returns the number of blocks
 * with infinity or NaN, for which fp8 has no room. */

struct format {
    uint32_t mantissa, bias, largest, infinity, nan, sign;
};

static const struct format FP16 = {10, 15, 0x7BFF, 0x7C00, 0x7E00, 15};
static const struct format FP10 = {4, 15, 0x1EF, 0x1F0, 0x1F8, 9};
static const struct format FP8 = {3, 7, 0x7E, 0x7E, 0x7F, 7};

static inline __attribute__((always_inline)) uint32_t shrink(float x, uint32_t keeps_gate, const struct format f) {
    uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFF, drop = 23 - f.mantissa;
    uint32_t normal = ((size + ((1u << (drop - 1)) - 1) + (size >> drop & 1)) >> drop) - ((127 - f.bias) << f.mantissa);
    /* The sum with a power of two whose last place is the format's smallest number rounds as a subnormal must. */
    uint32_t power = (127 + 24 - f.bias - f.mantissa) << 23;
    uint32_t tiny = bits_of(float_of(size) + float_of(power)) - power;
    uint32_t code = size < (128 - f.bias) << 23 ? tiny : normal;
    code = code > f.largest ? f.largest : code;
    code = size == 0x7F800000 ? f.infinity : code;
    code += (uint32_t)(code == 0) & (uint32_t)(size != 0) & keeps_gate;
    code |= bits >> 31 << f.sign;
    return size > 0x7F800000 ? f.nan : code;
}

static inline __attribute__((always_inline)) float widen(uint32_t code, const struct format f, int has_infinity) {
    uint32_t size = code & ((1u << f.sign) - 1), sign = code >> f.sign << 31;
    uint32_t normal = (size << (23 - f.mantissa)) + ((127 - f.bias) << 23);
    float tiny = (float)(int32_t)size * float_of((128 - f.bias - f.mantissa) << 23);
    uint32_t bits = size >> f.mantissa ? normal : bits_of(tiny);
    if (has_infinity)
        bits = size >= f.infinity ? 0x7F800000 | size << (23 - f.mantissa) : bits;
    return float_of(bits | sign);
}

static inline uint32_t shrink_to_bf16(float x, uint32_t keeps_gate) {
    uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFF, code = (size + 0x7FFF + (size >> 16 & 1)) >> 16;
    code = code > 0x7F7F ? 0x7F7F : code;
    code = size == 0x7F800000 ? 0x7F80 : code;
    code += (uint32_t)(code == 0) & (uint32_t)(size != 0) & keeps_gate;
    code |= bits >> 31 << 15;
    return size > 0x7F800000 ? 0x7FC0 : code;
}

#ifdef WITH_AVX2
/* Eight masks of 32 bits as eight of 16. */
static inline __m128i halves(__m256i wide) {
    return _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

/* Codes of 16 bits without their signs, finished: what must not be zero, and the signs. */
static inline __m128i signed_codes(__m128i codes, __m256i bits, __m256i size, uint32_t keeps_gate) {
    __m128i is_zero = halves(_mm256_cmpeq_epi32(size, _mm256_setzero_si256()));
    __m128i lost = _mm_andnot_si128(is_zero, _mm_cmpeq_epi16(codes, _mm_setzero_si128()));
    codes = _mm_sub_epi16(codes, _mm_and_si128(lost, _mm_set1_epi16((short)-(int)keeps_gate)));
    __m128i signs = halves(_mm256_srai_epi32(bits, 31));
    return _mm_or_si128(codes, _mm_and_si128(signs, _mm_set1_epi16((short)0x8000)));
}

/* True if one of the eight is larger than that, as infinity and NaN are; these are left to the loop for one. */
static inline int any_above(__m256i size, int32_t limit) {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(size, _mm256_set1_epi32(limit)));
}
#endif

static int64_t fp16_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    uint32_t keeps_gate = (uint32_t)job->numbers[0];
    const char *in = job->in;
    char *out = job->out;
    int64_t i = begin;
    while (i < end) {
#ifdef WITH_AVX2
        for (; i + 8 <= end; i += 8) {
            __m256i bits = _mm256_loadu_si256((const __m256i *)(in + 4 * i));
            __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
            if (any_above(size, 0x7F7FFFFF))
                break;
            __m256 clamped = _mm256_min_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(65504));
            __m128i codes = _mm256_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128((__m128i *)(out + 2 * i), signed_codes(codes, bits, size, keeps_gate));
        }
#endif
        for (int64_t stretch = least(end, i + 8); i < stretch; i++)
            store16(out + 2 * i, (uint16_t)shrink(load_float(in + 4 * i), keeps_gate, FP16));
    }
    return 0;
}

static int64_t fp16_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *in = job->in;
    char *out = job->out;
    int64_t i = begin;
#ifdef WITH_AVX2
    for (; i + 8 <= end; i += 8)
        _mm256_storeu_ps((float *)out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + 2 * i))));
#endif
    for (; i < end; i++)
        store_float(out + 4 * i, widen(load16(in + 2 * i), FP16, 1));
    return 0;
}

static int64_t bf16_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    uint32_t keeps_gate = (uint32_t)job->numbers[0];
    const char *in = job->in;
    char *out = job->out;
    int64_t i = begin;
    while (i < end) {
#ifdef WITH_AVX2
        for (; i + 8 <= end; i += 8) {
            __m256i bits = _mm256_loadu_si256((const __m256i *)(in + 4 * i));
            __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
            if (any_above(size, 0x7F7F7FFF)) /* too large, too */
                break;
            __m256i last = _mm256_and_si256(_mm256_srli_epi32(size, 16), _mm256_set1_epi32(1));
            __m256i raised = _mm256_add_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(0x7FFF)), last);
            __m128i codes = halves(_mm256_srli_epi32(raised, 16));
            _mm_storeu_si128((__m128i *)(out + 2 * i), signed_codes(codes, bits, size, keeps_gate));
        }
#endif
        for (int64_t stretch = least(end, i + 8); i < stretch; i++)
            store16(out + 2 * i, (uint16_t)shrink_to_bf16(load_float(in + 4 * i), keeps_gate));
    }
    return 0;
}

static int64_t bf16_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *in = job->in;
    char *out = job->out;
    for (int64_t i = begin; i < end; i++)
        store32(out + 4 * i, (uint32_t)load16(in + 2 * i) << 16);
    return 0;
}

static inline __attribute__((always_inline)) void fp10_words(const char *in, char *out, int64_t count, int64_t words,
                                                              uint32_t keeps_gate) {
    for (int64_t j = 0; j < words; j++) {
        uint32_t word = 0;
        for (int64_t k = 0; k < 3; k++)
            if (j + k * words < count)
                word |= shrink(load_float(in + 4 * (j + k * words)), keeps_gate, FP10) << (10 * k);
        store32(out + 4 * j, word);
    }
}

static int64_t fp10_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    uint32_t keeps_gate = (uint32_t)job->numbers[0];
    const char *in = (const char *)job->in + 4 * begin;
    char *out = (char *)job->out + begin / 24 * 32;
    int64_t left = end - begin;
    for (; left >= 24; left -= 24, in += 96, out += 32)
        fp10_words(in, out, 24, 8, keeps_gate);
    fp10_words(in, out, left, (left + 2) / 3, keeps_gate);
    return 0;
}

static inline __attribute__((always_inline)) void fp10_numbers(const char *in, char *out, int64_t count,
                                                                int64_t words) {
    for (int64_t k = 0; k < 3; k++)
#pragma GCC unroll 1 /* eight turns are one vector; unrolled they would be none */
        for (int64_t j = 0; j < least(words, count - k * words); j++)
            store_float(out + 4 * (j + k * words), widen(load32(in + 4 * j) >> (10 * k) & 0x3FF, FP10, 1));
}

static int64_t fp10_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *in = (const char *)job->in + begin / 24 * 32;
    char *out = (char *)job->out + 4 * begin;
    int64_t left = end - begin;
    for (; left >= 24; left -= 24, in += 32, out += 96)
        fp10_numbers(in, out, 24, 8);
    fp10_numbers(in, out, left, (left + 2) / 3);
    return 0;
}

/* The largest pattern without its sign; of infinity or NaN if there is one. */
static inline uint32_t largest_size(const char *in, int64_t count) {
    uint32_t largest = 0;
    for (int64_t k = 0; k < count; k++) {
        uint32_t size = load32(in + 4 * k) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    return largest;
}

static inline float within_float32(float x) {
    const float most = 0x1.fffffep127f;
    return x > most ? most : x < -most ? -most : x;
}

static int64_t fp8_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    uint32_t keeps_gate = (uint32_t)job->numbers[0];
    int64_t strange = 0;
    char *steps = job->out;
    uint8_t *codes = (uint8_t *)steps + 4 * ((job->count + BLOCK - 1) / BLOCK);
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t block = least(BLOCK, end - i);
        const char *in = (const char *)job->in + 4 * i;
        uint32_t largest = largest_size(in, block);
        strange += largest >= 0x7F800000;
        /* The power that puts the largest number into the format's last binade, up to 1.75 * 2^8. */
        int32_t power = 8 - ((int32_t)(largest >> 23) - 127) - ((largest & 0x7FFFFF) > 0x600000);
        power = largest == 0 ? 0 : power > 126 ? 126 : power;
        float scale = float_of((uint32_t)(127 + power) << 23);
        store32(steps + 4 * (i / BLOCK), (uint32_t)(127 - power) << 23);
        for (int64_t k = 0; k < block; k++) {
            float x = load_float(in + 4 * k);
            uint32_t code = shrink(x * scale, 0, FP8);
            code += (uint32_t)((code & 0x7F) == 0) & (uint32_t)((bits_of(x) & 0x7FFFFFFF) != 0) & keeps_gate;
            codes[i + k] = (uint8_t)code;
        }
    }
    return strange;
}

static int64_t fp8_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *steps = job->in;
    const uint8_t *codes = (const uint8_t *)steps + 4 * ((job->count + BLOCK - 1) / BLOCK);
    char *out = job->out;
    for (int64_t i = begin; i < end; i += BLOCK) {
        float step = load_float(steps + 4 * (i / BLOCK));
        for (int64_t k = i; k < least(end, i + BLOCK); k++)
            store_float(out + 4 * k, within_float32(widen(codes[k], FP8, 0) * step));
    }
    return 0;
}
