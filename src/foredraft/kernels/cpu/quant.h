/* int8 and int4 weights times activations of 8 bits, exact within a group.
 *
 * A row of activations is split into groups of w->group, each with its own scale. Arithmetic within a group is exact
 * in integers. Groups are added in float32, in order, and each product is rounded separately. So a result has the same
 * bits for any rows, threads and instruction set.
 *
 * Weights are stored unsigned (w + 128, w + 8), because the dot product of bytes needs one unsigned operand. The
 * accumulator starts at the correction, the offset times the sum of the group's activations.
 *
 * A step is 32 outputs times 4 bytes: 4 values of k in int8, 8 in int4 (the low halves first).
 * int8 panel: float32 scales [32], steps [k/4][32][4].       k is padded to 4
 * int4 panel: for every group bfloat16 scales [32], steps [group/8][32][4].   k is padded to 8
 * Row: float32 scales [groups], int32 starts [groups], values: bytes if the processor multiplies bytes, otherwise
 * 16-bit words, with the four of a step in the order 0 2 1 3.
 */
#ifndef FD_QUANT_H
#define FD_QUANT_H

#include "epilogue.h"
#include "foredraft.h"
#include "panel.h"
#include "simd.h"

#if LANES == 16
#define QUANT_ROWS 8 /* rows times PANEL_VECTORS accumulators in registers */
#elif LANES == 8 || defined(__aarch64__)
#define QUANT_ROWS 2
#else
#define QUANT_ROWS 1
#endif

/* acc + w.0 * x.0 + w.1 * x.1 of words, or the sum over four bytes with w unsigned and x signed. */
INLINE vi dot(vi acc, vu w, vu x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return (vi)vusdotq_s32((int32x4_t)acc, (uint8x16_t)w, (int8x16_t)x);
#elif HAS_BYTE_PRODUCTS
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif LANES == 16
    return acc + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif LANES == 8
    return acc + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    return acc + (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return acc + (vi)(w & 0xffff) * ((vi)(x << 16) >> 16) + (vi)(w >> 16) * ((vi)x >> 16);
#endif
}

/* Unpacks one vector of a step to operands of `dot`. Returns their number. */
INLINE int unpack(vu w, vu *to, const int kind) {
#if HAS_BYTE_PRODUCTS
    if (kind == FD_INT8) return to[0] = w, 1;
    to[0] = w & 0x0f0f0f0f;
    to[1] = (w >> 4) & 0x0f0f0f0f;
    return 2;
#else
    if (kind == FD_INT8) {
        to[0] = w & 0x00ff00ff;
        to[1] = (w >> 8) & 0x00ff00ff;
        return 2;
    }
    to[0] = w & 0x000f000f;
    to[1] = (w >> 8) & 0x000f000f;
    to[2] = (w >> 4) & 0x000f000f;
    to[3] = (w >> 12) & 0x000f000f;
    return 4;
#endif
}

typedef int8_t vb __attribute__((vector_size(LANES)));
typedef int16_t vw __attribute__((vector_size(LANES * 2)));
typedef int8_t vb_at __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t vw_at __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE int32_t reduce_max_int(vi x) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t max = x[0];
    for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
    return max;
#endif
}

INLINE int32_t reduce_sum_int(vi x) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

/* Words are in the order of `unpack`: 0 2 1 3. */
INLINE void store_quantised(char *to, vi n) {
#if HAS_BYTE_PRODUCTS
    *(vb_at *)to = __builtin_convertvector(n, vb);
#else
#if LANES == 16
    n = (vi)_mm512_shuffle_epi32((__m512i)n, 0xd8);
#elif LANES == 8
    n = (vi)_mm256_shuffle_epi32((__m256i)n, 0xd8);
#else
    n = (vi){n[0], n[2], n[1], n[3]};
#endif
    *(vw_at *)to = __builtin_convertvector(n, vw);
#endif
}

/* Quantises one group, a multiple of LANES. Returns its scale; NaN if a value is not finite, so results are NaN. */
INLINE float quantise(const float *x, int count, char *to, int32_t *total) {
    vi max_bits = {0}, sums = {0};
    for (int i = 0; i < count; i += LANES) {
        vi magnitude = (vi)load(x + i) & 0x7fffffff; /* absolute values are ordered like their bits */
        vi is_larger = magnitude > max_bits;
        max_bits = (magnitude & is_larger) | (max_bits & ~is_larger);
    }
    int32_t bits = reduce_max_int(max_bits);
    float max;
    memcpy(&max, &bits, 4);
    float inverse = max > 1e-30f && bits < 0x7f800000 ? 127.0f / max : 0;
    for (int i = 0; i < count; i += LANES) {
        vf shifted = load(x + i) * inverse + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
        vi n = (vi)shifted - (vi)broadcast(12582912.0f);
        sums += n;
        store_quantised(to + i * QUANT_VALUE_BYTES, n);
    }
    *total = reduce_sum_int(sums);
    return bits < 0x7f800000 ? (inverse > 0 ? max / 127.0f : 0) : __builtin_nanf("");
}

static void quant_prepare(const fd_weight *w, const float *x, char *to) {
    long groups = quant_groups(w);
    float *scale = (float *)to;
    int32_t *start = (int32_t *)(scale + groups);
    char *values = to + quant_header(w);
    int offset = w->kind == FD_INT8 ? -128 : -8;
    for (long g = 0; g < groups; g++) {
        long at = g * w->group;
        const float *from = x + at;
        float tail[w->group];
        if (w->k - at < w->group) { /* the last group may be short; padding zeros change nothing */
            memset(tail, 0, sizeof tail);
            from = memcpy(tail, from, (size_t)(w->k - at) * 4);
        }
        scale[g] = quantise(from, w->group, values + at * QUANT_VALUE_BYTES, start + g);
        start[g] *= offset;
    }
}

enum { QUANT_AHEAD = 8192 }; /* bytes from a step to the one that is fetched into the L2 cache meanwhile */

/* Adds the steps of one group for M rows to acc [M][PANEL_VECTORS]. */
INLINE void quant_steps(const char *w, const char *x, long stride, int steps, vi *acc, const int M, const int kind) {
    const int words = quant_step(kind) * QUANT_VALUE_BYTES / 4;
    for (int s = 0; s < steps; s++, w += STEP_BYTES, x += words * 4) {
        for (int i = 0; i < STEP_BYTES; i += 64) {
            __builtin_prefetch(w + QUANT_AHEAD + i, 0, 2);
            __builtin_prefetch(w + NEAR_BYTES + i, 0, 3);
        }
        _Pragma("GCC unroll 8") for (int v = 0; v < PANEL_VECTORS; v++) {
            vu part[4];
            const int parts = unpack(load_words((const uint32_t *)w + v * LANES), part, kind);
            _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {
                const uint32_t *n = (const uint32_t *)(x + m * stride);
                _Pragma("GCC unroll 4") for (int p = 0; p < parts; p++)
                    acc[m * PANEL_VECTORS + v] = dot(acc[m * PANEL_VECTORS + v], part[p], broadcast_words(n[p]));
            }
        }
    }
}

/* Activations of a tile of rows. */
typedef struct {
    const char *row; /* first row; `stride` is the distance to the next */
    long stride, groups, header, padded;
    int group;
} quant_rows;

/* Computes M rows of one panel; `to` is [M][32]. */
INLINE void quant_tile(const char *w, const quant_rows *x, float *to, const int M, const int kind) {
    const char *row = x->row, *panel = w;
    const long stride = x->stride, groups = x->groups;
    if (kind == FD_INT8) w += FD_PANEL * 4;
    for (int i = 0; i < M * PANEL_VECTORS; i++) store(to + i * LANES, (vf){0});
    for (long g = 0; g < groups; g++) {
        vi acc[QUANT_ROWS * PANEL_VECTORS];
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {
            uint32_t start = ((const uint32_t *)(row + m * stride))[groups + g];
            _Pragma("GCC unroll 8") for (int v = 0; v < PANEL_VECTORS; v++)
                acc[m * PANEL_VECTORS + v] = (vi)broadcast_words(start);
        }
        const char *scales = w;
        if (kind == FD_INT4) w += FD_PANEL * 2;
        long from = g * x->group, left = x->padded - from;
        int steps = (int)(left < x->group ? left : x->group) / quant_step(kind);
        const char *values = row + x->header + from * QUANT_VALUE_BYTES;
        quant_steps(w, values, stride, steps, acc, M, kind);
        w += steps * STEP_BYTES;
        vf weight_scale[PANEL_VECTORS]; /* read once, because the compiler must assume that `to` aliases the scales */
        if (kind == FD_INT4)
            for (int v = 0; v < PANEL_VECTORS; v++) weight_scale[v] = load_bf16((const uint16_t *)scales + v * LANES);
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {
            vf scale = broadcast(((const float *)(row + m * stride))[g]);
            _Pragma("GCC unroll 8") for (int v = 0; v < PANEL_VECTORS; v++) {
                float *sum = to + m * FD_PANEL + v * LANES;
                vf y = __builtin_convertvector(acc[m * PANEL_VECTORS + v], vf) * scale;
                if (kind == FD_INT4) y = y * weight_scale[v];
                store(sum, load(sum) + y);
            }
        }
    }
    if (kind == FD_INT8)
        for (int i = 0; i < M * PANEL_VECTORS; i++)
            store(to + i * LANES, load(to + i * LANES) * load((const float *)panel + i % PANEL_VECTORS * LANES));
}

#define QUANT_CASE(M)                                                                                                  \
    case M:                                                                                                            \
        if (kind == FD_INT8) quant_tile(w, x, to, M, FD_INT8);                                                         \
        else quant_tile(w, x, to, M, FD_INT4);                                                                         \
        break;

static void quant_run(const char *w, const quant_rows *x, float *to, int m, int kind) {
    switch (m) {
        QUANT_CASE(1)
#if QUANT_ROWS > 1
        QUANT_CASE(2)
#endif
#if QUANT_ROWS > 2
        QUANT_CASE(3) QUANT_CASE(4) QUANT_CASE(5) QUANT_CASE(6) QUANT_CASE(7) QUANT_CASE(8)
#endif
    }
}

/* Panels [first, last) of every row. */
static void quant_multiply(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    quant_rows tile = {x, quant_row_bytes(w), quant_groups(w), quant_header(w), quant_padded(w), w->group};
    int tiles = (rows + QUANT_ROWS - 1) / QUANT_ROWS, height = (rows + tiles - 1) / tiles;
    for (int p = first; p < last; p++) {
        const char *panel = (const char *)w->data + p * quant_panel_bytes(w);
        for (int r = 0; r < rows; r += height) {
            _Alignas(64) float to[QUANT_ROWS * FD_PANEL];
            int m = rows - r < height ? rows - r : height;
            tile.row = x + r * tile.stride;
            quant_run(panel, &tile, to, m, w->kind);
            for (int i = 0; i < m; i++) apply_epilogue(e, p, r + i, to + i * FD_PANEL);
        }
    }
}

#endif
