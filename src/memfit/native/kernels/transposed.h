/* Matrices of floats, transposed 16 by 16. */
#ifndef MEMFIT_TRANSPOSED_H
#define MEMFIT_TRANSPOSED_H

#include "kernels.h"

enum { LANES = 16 };

#ifdef MEMFIT_FOR_AVX2
#define INLINE static inline __attribute__((always_inline))

INLINE WITH_AVX512 __mmask16 first_lanes(int64_t count) {
    return (__mmask16)(count >= LANES ? 0xffff : (1u << count) - 1);
}

INLINE WITH_AVX512 void transpose_sixteen(__m512 rows[LANES]) {
    __m512 pairs[LANES], fours[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k += 2) {
        pairs[k] = _mm512_unpacklo_ps(rows[k], rows[k + 1]);
        pairs[k + 1] = _mm512_unpackhi_ps(rows[k], rows[k + 1]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < LANES; k += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512d one = _mm512_castps_pd(pairs[k + half]), other = _mm512_castps_pd(pairs[k + 2 + half]);
            fours[k + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(one, other));
            fours[k + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(one, other));
        }
    /* fours[4 * i + j] now has columns j, 4 + j, 8 + j and 12 + j of rows 4 * i to 4 * i + 3, in its quarters. */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512 even_low = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0x88);
        __m512 odd_low = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0xdd);
        __m512 even_high = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0x88);
        __m512 odd_high = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0xdd);
        rows[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        rows[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        rows[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        rows[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
}

/* Of a matrix that has less than `width` rows, those that are missing become columns of zeros. */
INLINE WITH_AVX512 void transpose(const float *from, int64_t from_stride, int64_t num_rows, int64_t num_columns, float *to,
                                  int64_t to_stride, int64_t width) {
    for (int64_t row = 0; row < width; row += LANES)
        for (int64_t column = 0; column < num_columns; column += LANES) {
            __m512 square[LANES];
            __mmask16 columns = first_lanes(num_columns - column), rows = first_lanes(width - row);
#pragma GCC unroll 16
            for (int64_t k = 0; k < LANES; k++)
                square[k] = row + k < num_rows
                                ? _mm512_maskz_loadu_ps(columns, from + (row + k) * from_stride + column)
                                : _mm512_setzero_ps();
            transpose_sixteen(square);
#pragma GCC unroll 16
            for (int64_t k = 0; k < LANES; k++)
                if (column + k < num_columns)
                    _mm512_mask_storeu_ps(to + (column + k) * to_stride + row, rows, square[k]);
        }
}
#endif

#endif
