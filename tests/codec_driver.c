/* Calls every codec kernel on random tensors in buffers of just their size, for the sanitizers to watch.
 *
 * Both tables must agree on every code and on what it gives back. Sizes, offsets and numbers of threads are random.
 * Usage: codec_driver ROUNDS SEED. Exits with 1 and a line of text at the first disagreement. */
#include <stdio.h>
#include <stdlib.h>

#include "codecs.h"

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (x ^ x >> 31) % below;
}

/* Memory that ends where its content ends, and begins at any address. */
struct room {
    char *block, *at;
    size_t size;
};

static struct room room(int64_t size) {
    size_t offset = draw(9);
    struct room made = {malloc((size_t)size + offset + 1), NULL, (size_t)size};
    /* One byte in front, so that a buffer of no bytes has an address too. */
    made.at = made.block + 1 + offset;
    memset(made.block, 0x5A, 1 + offset + (size_t)size);
    return made;
}

static void fill(struct room room, int64_t item, double zeros, int only_finite) {
    static const uint32_t odd[] = {0x7FC00000, 0xFF800000, 0x7F800000, 0x80000000, 1,          0x80000001, 0x3F800000,
                                   0x43E00000, 0x477FE000, 0x477FF000, 0x7F7FFFFF, 0xFF7FFFFF, 0x38000000, 0x33000000};
    for (size_t i = 0; i + (size_t)item <= room.size; i += (size_t)item) {
        uint64_t bits = draw(4) ? (draw(1 << 23) | (100 + draw(50)) << 23 | draw(2) << 31) : odd[draw(14)];
        if (only_finite && (bits >> 23 & 0xFF) == 0xFF)
            bits = 0x3F000000;
        if ((double)draw(1000) < 1000 * zeros)
            bits = 0;
        if (item == 8)
            bits |= bits << 32;
        memcpy(room.at + i, &bits, (size_t)item);
    }
}

static int disagree(const char *what, int64_t count) {
    printf("%s of %lld elements: the tables disagree\n", what, (long long)count);
    return 1;
}

/* Encode and decode by both tables. Returns 1 if they disagree; *back holds what came back, *result what the encoder
 * said. */
static int both(const char *what, int encode, int decode, struct job job, int64_t code_bytes, int64_t out_bytes,
                struct room *back, int64_t *result) {
    struct room codes[2], outs[2];
    int64_t results[2];
    for (int avx2 = 0; avx2 < 2; avx2++) {
        codes[avx2] = room(code_bytes);
        outs[avx2] = room(out_bytes);
        struct job there = job, again = job;
        there.out = codes[avx2].at;
        results[avx2] = memfit_codecs_run(encode, &there, 1 + (int)draw(3), avx2);
        again.in = codes[avx2].at;
        again.out = outs[avx2].at;
        if (results[avx2] == 0)
            memfit_codecs_run(decode, &again, 1 + (int)draw(3), avx2);
    }
    int bad = (results[0] == 0) != (results[1] == 0) || memcmp(outs[0].at, outs[1].at, outs[0].size) != 0;
    free(codes[0].block), free(codes[1].block), free(outs[0].block);
    *back = outs[1];
    *result = results[1];
    return bad ? disagree(what, job.count) : 0;
}

static int lossy(int which, const char *what, int64_t count, int64_t code_bytes, int is_blockwise) {
    struct room in = room(4 * count), back;
    fill(in, 4, 0.2, is_blockwise && draw(5));
    int64_t numbers[] = {(int64_t)draw(2), (int64_t)draw(1u << 31)}, result;
    struct job job = {in.at, NULL, NULL, count, numbers, NULL};
    int bad = both(what, which, which + 1, job, code_bytes, 4 * count, &back, &result);
    free(in.block), free(back.block);
    return bad;
}

static int compacted(int which, const char *what, int64_t count) {
    int64_t item = (int64_t[]){2, 4, 4, 8}[draw(4)], capacity = (int64_t)draw((uint64_t)count + 1), result;
    if (draw(2))
        capacity = count / 2 + 1;
    int64_t rest = 4 * ((count + BLOCK - 1) / BLOCK) + (which == SPARSE_ENCODE ? (count + 7) / 8 : capacity);
    struct room in = room(item * count), back;
    fill(in, item, (double)draw(10) / 9, 0);
    int64_t numbers[] = {item, capacity};
    struct job job = {in.at, NULL, NULL, count, numbers, NULL};
    int bad = both(what, which, which + 1, job, item * capacity + rest, item * count, &back, &result);
    int64_t nonzeros = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t value = 0;
        memcpy(&value, in.at + item * i, (size_t)item);
        nonzeros += value != 0;
    }
    if (!bad && (result == 0) != (nonzeros <= capacity))
        bad = disagree("capacity", count);
    if (!bad && result == 0 && memcmp(in.at, back.at, in.size) != 0)
        bad = disagree("round trip", count);
    free(in.block), free(back.block);
    return bad;
}

/* Non-zeros as small floats, with a capacity that is often too small. */
static int sparse_floats(int64_t format, int64_t count) {
    int64_t blocks = (count + BLOCK - 1) / BLOCK, fitting = (int64_t)draw((uint64_t)count + 1), result;
    int64_t most[] = {2 * fitting, 2 * fitting, 4 * ((fitting + 2 * least(fitting, blocks)) / 3),
                      fitting + 4 * least(fitting, blocks)};
    int64_t numbers[] = {(int64_t)draw(2), most[format], format};
    struct room in = room(4 * count), back;
    fill(in, 4, (double)draw(10) / 9, format == 3 && draw(5));
    struct job job = {in.at, NULL, NULL, count, numbers, NULL};
    int64_t code_bytes = most[format] + 4 * blocks + (count + 7) / 8;
    int bad = both("sparse floats", SPARSE_FLOAT_ENCODE, SPARSE_FLOAT_DECODE, job, code_bytes, 4 * count, &back, &result);
    int64_t nonzeros = 0, is_odd = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = load32(in.at + 4 * i);
        nonzeros += bits != 0;
        is_odd |= (bits >> 23 & 0xFF) == 0xFF;
        if (!bad && result == 0 && !bits && load32(back.at + 4 * i))
            bad = disagree("zeros", count);
    }
    if (!bad && result != 0 && nonzeros <= fitting && !(format == 3 && is_odd))
        bad = disagree("capacity of sparse floats", count);
    free(in.block), free(back.block);
    return bad;
}

static int masks(int64_t count) {
    float cells[] = {-__builtin_inff(), 0, 1, 1, __builtin_inff(), 2, 0, 1, 3};
    int64_t kind = (int64_t)draw(2), bits = 1 + (int64_t)draw(2), item = (int64_t)1 << draw(4);
    int64_t pack[] = {bits, kind, bits == 1 ? 1 : 3}, unpack[] = {bits, item, 5, 6, 7, 8}, gate[] = {1, item};
    struct room in = room((kind ? 2 : 4) * count), codes[2], outs[2], gradients[2];
    fill(in, kind ? 2 : 4, 0.2, 0);
    int bad = 0;
    for (int avx2 = 0; avx2 < 2; avx2++) {
        codes[avx2] = room((count * bits + 7) / 8), outs[avx2] = room(item * count);
        gradients[avx2] = room(item * count);
        struct job job = {in.at, NULL, codes[avx2].at, count, pack, cells};
        memfit_codecs_run(MASK_PACK, &job, 1 + (int)draw(3), avx2);
        job = (struct job){codes[avx2].at, NULL, outs[avx2].at, count, unpack, NULL};
        memfit_codecs_run(MASK_UNPACK, &job, 1 + (int)draw(3), avx2);
        if (bits == 1) {
            struct room apart = room(item * count);
            job = (struct job){codes[avx2].at, gradients[avx2].at, apart.at, count, gate, NULL};
            memfit_codecs_run(MASK_GATE, &job, 1 + (int)draw(3), avx2);
            job = (struct job){codes[avx2].at, NULL, gradients[avx2].at, count, gate, NULL};
            memfit_codecs_run(MASK_GATE, &job, 1 + (int)draw(3), avx2);
            bad |= memcmp(apart.at, gradients[avx2].at, apart.size);
            free(apart.block);
        }
    }
    bad |= memcmp(codes[0].at, codes[1].at, codes[0].size) || memcmp(outs[0].at, outs[1].at, outs[0].size) ||
           memcmp(gradients[0].at, gradients[1].at, gradients[0].size);
    for (int k = 0; k < 2; k++)
        free(codes[k].block), free(outs[k].block), free(gradients[k].block);
    struct room bools = room(count), packed[2];
    for (int64_t i = 0; i < count; i++)
        bools.at[i] = (char)draw(2);
    for (int avx2 = 0; avx2 < 2; avx2++) {
        packed[avx2] = room((count + 7) / 8);
        struct job job = {bools.at, NULL, packed[avx2].at, count, NULL, NULL};
        memfit_codecs_run(MASK_PACK_BOOL, &job, 1 + (int)draw(3), avx2);
    }
    bad |= memcmp(packed[0].at, packed[1].at, packed[0].size);
    free(in.block), free(bools.block), free(packed[0].block), free(packed[1].block);
    return bad ? disagree("mask", count) : 0;
}

enum { OUT = 13, SLOTS = 9, PLANE = 2 * 40 * 40 };

/* The gradient of the input below, from a code of good indices; some of these lie in the padding and go nowhere. */
static int windows_backward(const void *code, struct room indices, int64_t count, const int64_t *numbers,
                            const int64_t *distances) {
    int64_t bits = numbers[0], inner = numbers[4], planes = count / (2 * OUT * OUT), item = draw(2) ? 4 : 8;
    int64_t known[9 + 2 + OUT + OUT + 256] = {bits, 2, OUT, OUT, inner, item, PLANE, SLOTS, draw(2) ? 3 : 0};
    memcpy(known + 9, numbers + 6, (2 + OUT + OUT) * sizeof *known);
    memcpy(known + 9 + 2 + OUT + OUT, distances, sizeof(int64_t) << bits);
    struct room gradient = room(item * count), outs[2];
    fill(gradient, item, 0.1, 1);
    char *expected = calloc((size_t)(planes * PLANE + 1), (size_t)item);
    for (int64_t i = 0; i < count; i++) {
        int64_t index = (int64_t)load64(indices.at + 8 * i), outer = i / inner / (2 * OUT * OUT);
        char *at = expected + ((outer * PLANE + index) * inner + i % inner) * item;
        if (index < 0 || index >= PLANE)
            continue;
        if (item == 4) {
            store_float(at, load_float(at) + load_float(gradient.at + 4 * i));
        } else {
            double sum, more;
            memcpy(&sum, at, 8), memcpy(&more, gradient.at + 8 * i, 8);
            sum += more;
            memcpy(at, &sum, 8);
        }
    }
    int bad = 0;
    for (int avx2 = 0; avx2 < 2; avx2++) {
        outs[avx2] = room(planes * PLANE * item);
        struct job job = {code, gradient.at, outs[avx2].at, planes, known, NULL};
        memfit_codecs_run(WINDOW_BACKWARD, &job, 1 + (int)draw(3), avx2);
        bad |= memcmp(expected, outs[avx2].at, outs[avx2].size);
        free(outs[avx2].block);
    }
    free(gradient.block), free(expected);
    return bad ? disagree("window backward", count) : 0;
}

/* Windows of 3 by 3 over a row-major input of width 40, 2 planes deep; some indices are nowhere. */
static int windows(int64_t elements) {
    enum { REACH = 2 * 40 + 3 };
    int64_t inner = draw(2) ? 1 : 1 + (int64_t)draw(20), outer = elements / (2 * OUT * OUT * inner), bits = (int64_t[]){4, 8}[draw(2)], result;
    int64_t numbers[6 + 2 + OUT + OUT] = {bits, 2, OUT, OUT, inner, REACH, 0, 1600};
    for (int64_t o = 0; o < OUT; o++)
        numbers[8 + o] = (3 * o - 1) * 40, numbers[8 + OUT + o] = 3 * o - 1;
    int64_t distances[256] = {0}, count = outer * 2 * OUT * OUT * inner;
    uint16_t slots[REACH];
    memset(slots, 0xFF, sizeof slots);
    for (int64_t s = 0; s < SLOTS; s++)
        distances[s] = s / 3 * 40 + s % 3, slots[distances[s]] = (uint16_t)s;
    struct room in = room(8 * count), back;
    int is_strange = draw(4) == 0 && count;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i / inner, column = at % OUT, row = at / OUT % OUT, plane = at / OUT / OUT % 2;
        int64_t index = numbers[6 + plane] + numbers[8 + row] + numbers[8 + OUT + column] + distances[draw(SLOTS)];
        memcpy(in.at + 8 * i, &index, 8);
    }
    if (is_strange) {
        int64_t index = (int64_t)draw(2) ? -99 : INT64_MAX;
        memcpy(in.at + 8 * (int64_t)draw((uint64_t)count), &index, 8);
    }
    const void *tables[] = {slots, distances};
    struct job job = {in.at, NULL, NULL, count, numbers, NULL};
    int bad = 0;
    for (int avx2 = 0; avx2 < 2; avx2++) {
        struct room code = room((count * bits + 7) / 8);
        struct job there = job, again = job;
        there.in2 = tables[0], there.out = code.at;
        result = memfit_codecs_run(WINDOW_PACK, &there, 1 + (int)draw(3), avx2);
        back = room(8 * count);
        again.in = code.at, again.in2 = tables[1], again.out = back.at;
        memfit_codecs_run(WINDOW_UNPACK, &again, 1 + (int)draw(3), avx2);
        bad |= result != is_strange || (!is_strange && memcmp(in.at, back.at, in.size));
        bad |= !bad && !is_strange && windows_backward(code.at, in, count, numbers, distances);
        free(code.block), free(back.block);
    }
    free(in.block);
    return bad ? disagree("window", count) : 0;
}

static int narrows(int64_t count) {
    int64_t item = draw(2) ? 8 : 4, width = item == 8 ? (int64_t)1 << draw(3) : (int64_t)1 << draw(2), result;
    int64_t low = (int64_t)draw(200) - 100, numbers[] = {item, width, low};
    struct room in = room(item * count), back;
    int is_strange = draw(4) == 0 && count;
    for (int64_t i = 0; i < count; i++) {
        int64_t x = low + (int64_t)draw(256);
        memcpy(in.at + item * i, &x, (size_t)item);
    }
    if (is_strange) {
        int64_t x = low - 1;
        memcpy(in.at + item * (int64_t)draw((uint64_t)count), &x, (size_t)item);
    }
    struct job job = {in.at, NULL, NULL, count, numbers, NULL};
    int bad = both("narrow", NARROW_ENCODE, NARROW_DECODE, job, width * count, item * count, &back, &result);
    if (!bad && ((result != 0) != is_strange || (!is_strange && memcmp(in.at, back.at, in.size) != 0)))
        bad = disagree("narrow round trip", count);
    free(in.block), free(back.block);
    return bad;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    state = (uint64_t)atoll(argv[2]);
    int bad = 0;
    for (int round = 0; round < atoi(argv[1]) && !bad; round++) {
        /* Now and then enough elements for threads. */
        int64_t n = round % 10 ? (int64_t)draw(draw(2) ? 1700 : 40) : 150000 + (int64_t)draw(90000);
        int64_t blocks = (n + BLOCK - 1) / BLOCK;
        bad = masks(n) || windows(round % 10 ? (int64_t)draw(9000) : 100000) || narrows(n) ||
              compacted(SPARSE_ENCODE, "sparse", n) || compacted(CSR_ENCODE, "csr", n) ||
              sparse_floats((int64_t)draw(4), n) || lossy(FP16_ENCODE, "fp16", n, 2 * n, 0) || lossy(BF16_ENCODE, "bf16", n, 2 * n, 0) ||
              lossy(FP10_ENCODE, "fp10", n, 4 * ((n + 2) / 3), 0) ||
              lossy(FP8_ENCODE, "fp8", n, 4 * blocks + n, 1) || lossy(INT8_ENCODE, "int8", n, 4 * blocks + n, 1) ||
              lossy(INT4_ENCODE, "int4", n, 4 * blocks + (n + 1) / 2, 1);
    }
    return bad;
}
