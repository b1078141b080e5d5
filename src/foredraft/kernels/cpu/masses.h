/* Arithmetic on the masses of a distribution in double precision. verification/masses.py is the reference.
 *
 * The order of a sum is fixed, so that it has the same bits everywhere: blocks of SUM_BLOCK masses, one after the other,
 * and in a block SUM_LANES interleaved sums, which are added by halves. */
#ifndef FD_MASSES_H
#define FD_MASSES_H

#include "simd.h"

typedef double vd __attribute__((vector_size(LANES * 4)));
typedef double vd_at __attribute__((vector_size(LANES * 4), aligned(8), may_alias));
enum { DOUBLES = LANES / 2, SUM_LANES = 32, SUM_BLOCK = 1024, SUM_VECTORS = SUM_LANES / DOUBLES };

typedef struct {
    const void *data;
    int is_float;
} mass_array;

INLINE double read_mass(mass_array x, int64_t i) {
    return x.is_float ? (double)((const float *)x.data)[i] : ((const double *)x.data)[i];
}

INLINE vd load_masses(mass_array x, int64_t i) {
    if (!x.is_float) return *(const vd_at *)((const double *)x.data + i);
    const float *from = (const float *)x.data + i;
#if LANES == 16
    return (vd)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif LANES == 8
    return (vd)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
    return (vd){from[0], from[1]};
#endif
}

/* Sum of at most SUM_BLOCK masses. */
static double sum_block(mass_array x, int64_t first, int64_t n) {
    vd sum[SUM_VECTORS] = {0};
    double lane[SUM_LANES];
    int64_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int v = 0; v < SUM_VECTORS; v++) sum[v] += load_masses(x, first + i + v * DOUBLES);
    memcpy(lane, sum, sizeof lane);
    for (int l = 0; i < n; i++, l++) lane[l] += read_mass(x, first + i);
    for (int half = SUM_LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

INLINE int64_t block_size(int64_t n, int64_t first) { return n - first < SUM_BLOCK ? n - first : SUM_BLOCK; }

static double sum_masses(const void *data, int is_float, int64_t n) {
    mass_array x = {data, is_float};
    double total = 0;
    for (int64_t i = 0; i < n; i += SUM_BLOCK) total += sum_block(x, i, block_size(n, i));
    return total;
}

static void divide_masses(const void *data, int is_float, int64_t n, double total, double *out) {
    mass_array x = {data, is_float};
    int64_t i = 0;
    for (; i + DOUBLES <= n; i += DOUBLES) *(vd_at *)(out + i) = load_masses(x, i) / total;
    for (; i < n; i++) out[i] = read_mass(x, i) / total;
}

/* out = max(0, weight * p - q) */
static void subtract_masses(const double *p, double weight, const double *q, int64_t n, double *out) {
    int64_t i = 0;
    for (; i + DOUBLES <= n; i += DOUBLES) {
        vd rest = *(const vd_at *)(p + i) * weight - *(const vd_at *)(q + i);
#if LANES == 16
        rest = (vd)_mm512_max_pd((__m512d)rest, _mm512_setzero_pd());
#elif LANES == 8
        rest = (vd)_mm256_max_pd((__m256d)rest, _mm256_setzero_pd());
#else
        for (int l = 0; l < DOUBLES; l++) rest[l] = rest[l] > 0 ? rest[l] : 0;
#endif
        *(vd_at *)(out + i) = rest;
    }
    for (; i < n; i++) {
        double rest = p[i] * weight - q[i];
        out[i] = rest > 0 ? rest : 0;
    }
}

/* First index whose cumulative mass exceeds u * total; the last one with mass if rounding leaves none; -1 if no index has
 * mass. The sum within a block starts at the sum of the blocks before it. sums: [number of blocks] scratch. */
static int64_t sample_mass(const double *mass, int64_t n, double u, double *sums) {
    mass_array x = {mass, 0};
    double total = 0, before = 0;
    int64_t blocks = 0, b = 0;
    for (int64_t i = 0; i < n; i += SUM_BLOCK) sums[blocks++] = total += sum_block(x, i, block_size(n, i));
    double target = u * total;
    while (b < blocks && !(sums[b] > target)) b++;
    int64_t first = b * SUM_BLOCK, last = b < blocks ? first + block_size(n, first) : n;
    if (b) before = sums[b - 1];
    for (int64_t i = first; i < last; i++) {
        before += mass[i];
        if (before > target) return i;
    }
    while (last > 0 && !(mass[last - 1] > 0)) last--;
    return last - 1;
}

#endif
