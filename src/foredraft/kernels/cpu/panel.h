/* Sizes of packed weights, and of activations in the format of a weight's kernel. quant.h describes int8 and int4. */
#ifndef FD_PANEL_H
#define FD_PANEL_H

#include "foredraft.h"
#include "simd.h"

#define PANEL_VECTORS (FD_PANEL / LANES) /* vectors of a panel */
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_BYTE_PRODUCTS 1
#else
#define HAS_BYTE_PRODUCTS 0
#endif
#define QUANT_VALUE_BYTES (HAS_BYTE_PRODUCTS ? 1 : 2) /* of a quantised activation */
#define STEP_BYTES (FD_PANEL * 4)                     /* of one step of a quantised panel */

/* Values of k in a step. */
INLINE int quant_step(int kind) { return kind == FD_INT8 ? 4 : 8; }
INLINE long quant_padded(const fd_weight *w) {
    int step = quant_step(w->kind);
    return ((long)w->k + step - 1) / step * step;
}
INLINE long quant_groups(const fd_weight *w) { return (w->k + w->group - 1) / w->group; }
INLINE long quant_header(const fd_weight *w) { return (quant_groups(w) * 8 + 63) / 64 * 64; }
INLINE long quant_row_bytes(const fd_weight *w) {
    return quant_header(w) + quant_groups(w) * w->group * QUANT_VALUE_BYTES;
}
INLINE long quant_panel_bytes(const fd_weight *w) {
    long steps = quant_padded(w) / quant_step(w->kind);
    return steps * STEP_BYTES + (w->kind == FD_INT8 ? FD_PANEL * 4 : quant_groups(w) * FD_PANEL * 2);
}

/* Tuning of a product of so many rows. */
INLINE const fd_tuning *find_tuning(int rows) { return &fd_tuned[rows == 1 ? 0 : rows <= 4 ? 1 : 2]; }

/* Bytes of one row of inputs of a bf16 product. A line more than needed keeps rows from sharing the sets of a cache. */
INLINE long rounded_bytes(long k) { return ((k + 1) / 2 * 2 * (long)sizeof(rounded) + 127) / 64 * 64; }

/* Bytes of one row of activations. */
INLINE long row_bytes(const fd_weight *w) {
    if (w->kind == FD_BF16) return rounded_bytes(w->k);
    if (w->kind == FD_F32) return ((long)w->k * 4 + 63) / 64 * 64;
    return quant_row_bytes(w);
}

/* Bytes of one panel of weights. */
INLINE long panel_bytes(const fd_weight *w) {
    if (w->kind == FD_BF16) return (long)((w->k + 1) / 2) * FD_PANEL * 4;
    if (w->kind == FD_F32) return (long)w->k * FD_PANEL * 4;
    return quant_panel_bytes(w);
}

#define LINE_VECTORS (64 / (LANES * 4)) /* vectors of a cache line */

#define NEAR_BYTES 1024 /* from the L2 cache to the L1 cache */

/* Fetches what a tile reads `ahead` bytes later into the L2 cache, and what it reads soon into the L1 cache. */
INLINE void prefetch_step(const char *const *col, int k, long ahead, const int V) {
    _Pragma("GCC unroll 8") for (int j = 0; j < V; j += LINE_VECTORS) {
        const char *line = col[j] + (long)k * FD_PANEL * 4;
        __builtin_prefetch(line + ahead, 0, 2);
        __builtin_prefetch(line + NEAR_BYTES, 0, 3);
    }
}

#endif
