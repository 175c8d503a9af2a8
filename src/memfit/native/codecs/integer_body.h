/* Whole numbers: floats as multiples of a step per block, and integers in fewer bytes.
 *
 * int8, int4: [step of each block of 256: float32][codes]. A block without negative numbers counts from 0 to 255 (15),
 * another from -127 (-7) to 127 (7), and then its step is stored negative. int4: byte j of a block holds the elements j
 * and j + half, half the number of its bytes. Rounding is up or down at random, in proportion: numbers = (keeps_gate,
 * seed). The random number of an element depends on the seed, its place and the sum of the bits of its block.
 * The encoder returns the number of blocks with infinity or NaN.
 * narrow: numbers = (bytes of an element, bytes of a code, least value); the code is the unsigned difference to the
 * least value; the encoder returns how many elements are out of range. */

/* Every bit of the input reaches every bit of the result (two rounds of multiply and shift). */
static inline uint32_t stir(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

/* The codes of one block, as signed numbers; returns its step, or NaN if it has no code. */
static inline __attribute__((always_inline)) float quantise(const struct job *job, const char *in, int64_t count,
                                                             int64_t place, int32_t top_signed, int32_t top_unsigned,
                                                             int32_t *codes) {
    int32_t keeps_gate = (int32_t)job->numbers[0];
    uint32_t largest = largest_size(in, count), signs = 0, sum = 0;
    if (largest >= 0x7F800000)
        return float_of(0x7FC00000);
    for (int64_t k = 0; k < count; k++) {
        uint32_t bits = load32(in + 4 * k);
        signs |= bits & (uint32_t) - (int32_t)(bits << 1 != 0); /* -0.0 is not negative */
        sum += bits;
    }
    int32_t is_signed = (int32_t)(signs >> 31), top = is_signed ? top_signed : top_unsigned;
    float step = float_of(largest) / (float)top;
    step = step < 0x1p-126f ? 0x1p-126f : step; /* its inverse must be finite */
    float inverse = 1.0f / step;
    uint32_t key = stir(stir((uint32_t)place) ^ (uint32_t)job->numbers[1] ^ sum);
    for (int64_t k = 0; k < count; k++) {
        float x = load_float(in + 4 * k);
        float chance = (float)(int32_t)(stir(key + (uint32_t)k * 0x9E3779B9u) >> 8) * 0x1p-24f;
        float raised = x * inverse + chance;
        int32_t code = (int32_t)raised - ((float)(int32_t)raised > raised); /* floor, without the library */
        code = code > top ? top : code < -top ? -top : code;
        int32_t size = (int32_t)(bits_of(x) & 0x7FFFFFFF), side = 1 - 2 * (int32_t)(bits_of(x) >> 31);
        codes[k] = code + (side & -((code == 0) & (size != 0) & keeps_gate));
    }
    return is_signed ? -step : step;
}

static inline float multiple(int32_t code, float step) { return within_float32((float)code * step); }

static int64_t int8_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    char *steps = job->out;
    uint8_t *out = (uint8_t *)steps + 4 * ((job->count + BLOCK - 1) / BLOCK);
    int32_t codes[BLOCK];
    int64_t strange = 0;
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t block = least(BLOCK, end - i);
        float step = quantise(job, (const char *)job->in + 4 * i, block, i / BLOCK, 127, 255, codes);
        if (step != step) {
            strange++;
            continue;
        }
        store_float(steps + 4 * (i / BLOCK), step);
        for (int64_t k = 0; k < block; k++)
            out[i + k] = (uint8_t)codes[k];
    }
    return strange;
}

static int64_t int8_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *steps = job->in;
    const uint8_t *in = (const uint8_t *)steps + 4 * ((job->count + BLOCK - 1) / BLOCK);
    char *out = job->out;
    for (int64_t i = begin; i < end; i += BLOCK) {
        float step = load_float(steps + 4 * (i / BLOCK));
        int64_t last = least(end, i + BLOCK);
        if (step < 0)
            for (int64_t k = i; k < last; k++)
                store_float(out + 4 * k, multiple((int8_t)in[k], -step));
        else
            for (int64_t k = i; k < last; k++)
                store_float(out + 4 * k, multiple(in[k], step));
    }
    return 0;
}

static int64_t int4_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    char *steps = job->out;
    uint8_t *out = (uint8_t *)steps + 4 * ((job->count + BLOCK - 1) / BLOCK);
    int32_t codes[BLOCK];
    int64_t strange = 0;
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t block = least(BLOCK, end - i), half = (block + 1) / 2;
        float step = quantise(job, (const char *)job->in + 4 * i, block, i / BLOCK, 7, 15, codes);
        if (step != step) {
            strange++;
            continue;
        }
        if (block & 1)
            codes[block] = 0;
        store_float(steps + 4 * (i / BLOCK), step);
        for (int64_t k = 0; k < half; k++)
            out[i / 2 + k] = (uint8_t)((codes[k] & 15) | (codes[k + half] & 15) << 4);
    }
    return strange;
}

static int64_t int4_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *steps = job->in;
    const uint8_t *in = (const uint8_t *)steps + 4 * ((job->count + BLOCK - 1) / BLOCK);
    for (int64_t i = begin; i < end; i += BLOCK) {
        float step = load_float(steps + 4 * (i / BLOCK));
        int64_t block = least(BLOCK, end - i), half = (block + 1) / 2;
        char *out = (char *)job->out + 4 * i;
        /* (c ^ flip) - flip is the code with its sign; the other way round for a block that has none. */
        int32_t flip = step < 0 ? 8 : 0;
        float size = step < 0 ? -step : step;
        for (int64_t k = 0; k < half; k++)
            store_float(out + 4 * k, multiple(((in[i / 2 + k] & 15) ^ flip) - flip, size));
        for (int64_t k = half; k < block; k++)
            store_float(out + 4 * k, multiple(((in[i / 2 + k - half] >> 4) ^ flip) - flip, size));
    }
    return 0;
}

#define NARROW(from, to)                                                                                              \
    for (int64_t i = begin; i < end; i++) {                                                                            \
        from x;                                                                                                        \
        memcpy(&x, in + (int64_t)sizeof x * i, sizeof x);                                                              \
        uint64_t code = (uint64_t)(int64_t)x - low;                                                                    \
        to kept = (to)code;                                                                                            \
        strange += kept != code;                                                                                       \
        memcpy(out + (int64_t)sizeof kept * i, &kept, sizeof kept);                                                    \
    }

#define BROADEN(from, to)                                                                                             \
    for (int64_t i = begin; i < end; i++) {                                                                            \
        to kept;                                                                                                       \
        memcpy(&kept, in + (int64_t)sizeof kept * i, sizeof kept);                                                     \
        from x = (from)(kept + low);                                                                                   \
        memcpy(out + (int64_t)sizeof x * i, &x, sizeof x);                                                             \
    }

#define EACH_WIDTH(loop)                                                                                              \
    switch (job->numbers[0] * 10 + job->numbers[1]) {                                                                  \
    case 81: loop(int64_t, uint8_t) break;                                                                             \
    case 82: loop(int64_t, uint16_t) break;                                                                            \
    case 84: loop(int64_t, uint32_t) break;                                                                            \
    case 41: loop(int32_t, uint8_t) break;                                                                             \
    default: loop(int32_t, uint16_t)                                                                                   \
    }

static int64_t narrow_encode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *in = job->in;
    char *out = job->out;
    uint64_t low = (uint64_t)job->numbers[2];
    int64_t strange = 0;
    EACH_WIDTH(NARROW)
    return strange;
}

static int64_t narrow_decode(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const char *in = job->in;
    char *out = job->out;
    uint64_t low = (uint64_t)job->numbers[2];
    EACH_WIDTH(BROADEN)
    return 0;
}
