/* Max-pool indices as slots of their windows.
 *
 * An index is its window's start, plus how far into the input its slot lies from there; both are sums over the
 * dimensions, so one table of distances serves all windows: slot -> distance to unpack, distance -> slot to pack.
 * numbers = (bits, out depth, out height, out width, inner, distances), then the starts of the windows along each
 * dimension, as distances in the input. Elements are in the order (outer, depth, height, width, inner).
 * window_pack: in2 is the slot of each distance (uint16, NO_SLOT for none); returns the number of indices that lie in
 * no slot of their window.
 * window_unpack: in2 is the distance of each slot (int64). */

enum { NO_SLOT = 0xFFFF };

/* Where an element is: the start of its window's row, its column, and its place in the innermost dimension. */
struct place {
    int64_t base, depth, row, column, inner;
};

static inline void place_row(const int64_t *numbers, struct place *at) {
    at->base = numbers[6 + at->depth] + numbers[6 + numbers[1] + at->row];
}

static inline struct place place_of(const int64_t *numbers, int64_t i) {
    struct place at;
    at.inner = i % numbers[4];
    i /= numbers[4];
    at.column = i % numbers[3];
    i /= numbers[3];
    at.row = i % numbers[2];
    at.depth = i / numbers[2] % numbers[1];
    place_row(numbers, &at);
    return at;
}

/* On to the next column, over the edges of rows, planes and images. */
static inline void place_next(const int64_t *numbers, struct place *at) {
    at->inner = 0;
    if (++at->column < numbers[3])
        return;
    at->column = 0;
    if (++at->row == numbers[2]) {
        at->row = 0;
        if (++at->depth == numbers[1])
            at->depth = 0;
    }
    place_row(numbers, at);
}

static int64_t window_pack(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const int64_t *numbers = job->numbers, *columns = numbers + 6 + numbers[1] + numbers[2];
    int64_t bits = numbers[0], inner = numbers[4], strange = 0;
    uint64_t distances = (uint64_t)numbers[5];
    const char *in = job->in, *table = job->in2;
    uint8_t *out = (uint8_t *)job->out + begin * bits / 8;
    struct place at = begin < end ? place_of(numbers, begin) : (struct place){0};
    uint8_t slots[GRAIN];
    for (int64_t i = begin; i < end;) {
        int64_t filled = 0, wanted = least(GRAIN, end - i);
        while (filled < wanted) {
            /* A run of elements of one window start (inner), or of one row. */
            int64_t run = least(inner == 1 ? numbers[3] - at.column : inner - at.inner, wanted - filled);
            for (int64_t k = 0; k < run; k++) {
                int64_t window = at.base + columns[inner == 1 ? at.column + k : at.column];
                uint64_t distance = load64(in + 8 * (i + filled + k)) - (uint64_t)window;
                uint16_t slot = distance < distances ? load16(table + 2 * distance) : NO_SLOT;
                strange += slot == NO_SLOT;
                slots[filled + k] = (uint8_t)slot;
            }
            filled += run;
            if (inner == 1) {
                at.column += run - 1;
                place_next(numbers, &at);
            } else if ((at.inner += run) == inner) {
                place_next(numbers, &at);
            }
        }
        if (bits == 8) {
            memcpy(out, slots, (size_t)filled);
            out += filled;
        } else {
            int64_t per_byte = 8 / bits;
            memset(slots + filled, 0, (size_t)(GRAIN - filled));
            if (bits == 4)
                for (int64_t k = 0; k < filled; k += 2)
                    *out++ = (uint8_t)(slots[k] | slots[k + 1] << 4);
            else
                for (int64_t k = 0; k < filled; k += per_byte)
                    *out++ = (uint8_t)(slots[k] | slots[k + 1] << 2 | slots[k + 2] << 4 | slots[k + 3] << 6);
        }
        i += filled;
    }
    return strange;
}

static int64_t window_unpack(const struct job *job, int64_t begin, int64_t end, int64_t start, int64_t stop) {
    (void)start, (void)stop;
    const int64_t *numbers = job->numbers, *columns = numbers + 6 + numbers[1] + numbers[2];
    int64_t bits = numbers[0], inner = numbers[4];
    const uint8_t *in = (const uint8_t *)job->in + begin * bits / 8;
    const char *table = job->in2;
    char *out = job->out;
    struct place at = begin < end ? place_of(numbers, begin) : (struct place){0};
    uint8_t slots[GRAIN];
    for (int64_t i = begin; i < end;) {
        int64_t filled = 0, wanted = least(GRAIN, end - i);
        if (bits == 8)
            memcpy(slots, in, (size_t)wanted), in += wanted;
        else if (bits == 4)
            for (int64_t k = 0; k < wanted; k += 2, in++)
                slots[k] = *in & 15, slots[k + 1] = *in >> 4;
        else
            for (int64_t k = 0; k < wanted; k += 4, in++)
                slots[k] = *in & 3, slots[k + 1] = *in >> 2 & 3, slots[k + 2] = *in >> 4 & 3, slots[k + 3] = *in >> 6;
        while (filled < wanted) {
            int64_t run = least(inner == 1 ? numbers[3] - at.column : inner - at.inner, wanted - filled);
            for (int64_t k = 0; k < run; k++) {
                int64_t window = at.base + columns[inner == 1 ? at.column + k : at.column];
                store64(out + 8 * (i + filled + k), (uint64_t)window + load64(table + 8 * slots[filled + k]));
            }
            filled += run;
            if (inner == 1) {
                at.column += run - 1;
                place_next(numbers, &at);
            } else if ((at.inner += run) == inner) {
                place_next(numbers, &at);
            }
        }
        i += filled;
    }
    return 0;
}
