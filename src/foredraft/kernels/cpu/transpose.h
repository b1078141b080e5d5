/* Squares of LANES x LANES numbers, transposed in registers. */
#ifndef FD_TRANSPOSE_H
#define FD_TRANSPOSE_H

#include "simd.h"

/* Number j of vector i becomes number i of vector j. */
INLINE void transpose_lanes(vf *x) {
#if LANES == 16
    __m512 a[16], b[16];
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)x[i], (__m512)x[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)x[i], (__m512)x[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) { /* four numbers each of columns j, j + 4, j + 8 and j + 12 */
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
        }
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
        __m512 even = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
        __m512 more_even = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
        __m512 more_odd = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
        x[j] = (vf)_mm512_shuffle_f32x4(even, more_even, 0x88);
        x[j + 4] = (vf)_mm512_shuffle_f32x4(odd, more_odd, 0x88);
        x[j + 8] = (vf)_mm512_shuffle_f32x4(even, more_even, 0xdd);
        x[j + 12] = (vf)_mm512_shuffle_f32x4(odd, more_odd, 0xdd);
    }
#elif LANES == 8
    __m256 a[8], b[8];
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < 8; i += 4) { /* four numbers each of columns j and j + 4 */
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = (__m256)_mm256_unpacklo_pd((__m256d)a[i + j], (__m256d)a[i + j + 2]);
            b[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd((__m256d)a[i + j], (__m256d)a[i + j + 2]);
        }
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
        x[j] = (vf)_mm256_permute2f128_ps(b[j], b[j + 4], 0x20);
        x[j + 4] = (vf)_mm256_permute2f128_ps(b[j], b[j + 4], 0x31);
    }
#else
    vf y[4] = {x[0], x[1], x[2], x[3]};
    for (int j = 0; j < 4; j++) x[j] = (vf){y[0][j], y[1][j], y[2][j], y[3][j]};
#endif
}

#endif
