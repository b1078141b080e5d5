/* y = x W^T for any number of rows. Every output is one chain of additions over k, independent of the other rows. */
#ifndef FD_LINEAR_H
#define FD_LINEAR_H

#include "epilogue.h"
#include "foredraft.h"
#include "linear_amx.h"
#include "panel.h"
#include "quant.h"
#include "simd.h"
#include "team.h"

/* Converts one row of activations to the format of this weight's kernel. */
static void convert_row(const fd_weight *w, const float *x, char *to) {
    if (w->kind == FD_F32) {
        memcpy(to, x, (size_t)w->k * 4);
    } else if (w->kind == FD_BF16) {
        rounded *h = (rounded *)to;
        round_row(x, w->k, h);
        if (w->k & 1) h[w->k] = 0;
    } else {
        quant_prepare(w, x, to);
    }
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

/* M rows times V vectors of outputs; column j starts at col[j] and advances by a panel's width per step. */
#define TILE(NAME, WORD, LOAD, BROADCAST, STEP)                                                                        \
    INLINE void NAME(const char *const *col, int steps, const WORD *x, long stride, float *to, long ahead, const int M, \
                     const int V) {                                                                                    \
        vf acc[ACCUMULATORS];                                                                                          \
        _Pragma("GCC unroll 24") for (int i = 0; i < M * V; i++) acc[i] = (vf){0};                                     \
        for (int k = 0; k < steps; k++) {                                                                              \
            if (ahead) prefetch_step(col, k, ahead, V);                                                                \
            _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {                                                     \
                _Pragma("GCC unroll 8") for (int j = 0; j < V; j++) acc[m * V + j] = STEP(                             \
                    acc[m * V + j], LOAD((const WORD *)col[j] + (long)k * FD_PANEL), BROADCAST(x[m * stride + k]));    \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {                                                         \
            _Pragma("GCC unroll 8") for (int j = 0; j < V; j++)                                                        \
                store(to + m * 4 * FD_PANEL + j * LANES, acc[m * V + j]);                                              \
        }                                                                                                              \
    }

#define MULTIPLY_ADD(acc, w, x) multiply_add(w, x, acc)
TILE(tile_f32, float, load, broadcast, MULTIPLY_ADD)
#if HAS_BF16_PRODUCTS
TILE(tile_bf16, uint32_t, load_words, broadcast_words, dot_bf16)
#else
/* The additions of `dot_bf16`. One half of all pairs comes after the other, so its vectors stay in registers. */
INLINE void tile_bf16(const char *const *col, int steps, const float *x, long stride, float *to, long ahead,
                      const int M, const int V) {
    vf acc[ACCUMULATORS];
    _Pragma("GCC unroll 24") for (int i = 0; i < M * V; i++) acc[i] = (vf){0};
    for (int k = 0; k < steps; k++) {
        if (ahead) prefetch_step(col, k, ahead, V);
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            vf w[8];
            _Pragma("GCC unroll 8") for (int j = 0; j < V; j++) {
                vu words = load_words((const uint32_t *)col[j] + (long)k * FD_PANEL);
                w[j] = (vf)(half ? words & 0xffff0000u : words << 16);
            }
            _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {
                vf value = broadcast(x[m * stride + 2 * k + half]);
                _Pragma("GCC unroll 8") for (int j = 0; j < V; j++)
                    acc[m * V + j] = multiply_add(w[j], value, acc[m * V + j]);
            }
        }
    }
    _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {
        _Pragma("GCC unroll 8") for (int j = 0; j < V; j++)
            store(to + m * 4 * FD_PANEL + j * LANES, acc[m * V + j]);
    }
}
#endif

#define CASES(TILE_, V, M)                                                                                             \
    case (V) * 16 + (M):                                                                                               \
        TILE_(col, steps, x, stride, to, ahead, M, V);                                                                 \
        break;
#if ACCUMULATORS == 24
#define ALL_CASES(T)                                                                                                   \
    CASES(T, 8, 1) CASES(T, 8, 2) CASES(T, 8, 3) CASES(T, 4, 1) CASES(T, 4, 2) CASES(T, 4, 3) CASES(T, 4, 4)           \
    CASES(T, 4, 5) CASES(T, 4, 6) CASES(T, 2, 1) CASES(T, 2, 2) CASES(T, 2, 3) CASES(T, 2, 4) CASES(T, 2, 5)           \
    CASES(T, 2, 6) CASES(T, 2, 7) CASES(T, 2, 8) CASES(T, 2, 9) CASES(T, 2, 10) CASES(T, 2, 11) CASES(T, 2, 12)
#else
#define ALL_CASES(T)                                                                                                   \
    CASES(T, 8, 1) CASES(T, 4, 1) CASES(T, 4, 2) CASES(T, 4, 3) CASES(T, 2, 1) CASES(T, 2, 2) CASES(T, 2, 3)           \
    CASES(T, 2, 4) CASES(T, 2, 5) CASES(T, 2, 6)
#endif

#if HAS_BF16_PRODUCTS
typedef uint32_t bf16_input;
#else
typedef float bf16_input;
#endif
static void run_bf16(const char *const *col, int steps, const bf16_input *x, long stride, float *to, long ahead, int m,
                     int v) {
    switch (v * 16 + m) { ALL_CASES(tile_bf16) }
}
static void run_f32(const char *const *col, int steps, const float *x, long stride, float *to, long ahead, int m,
                    int v) {
    switch (v * 16 + m) { ALL_CASES(tile_f32) }
}

/* `count` panels from `panel` on for m rows: all their vectors, or halves of a panel if registers are few. */
static void multiply_block(const fd_weight *w, const char *x, long stride, int panel, int count, int m, int v,
                           long ahead, float *to) {
    const char *data = (const char *)w->data + panel * panel_bytes(w);
    for (int j0 = 0; j0 < count * PANEL_VECTORS; j0 += v) {
        const char *col[8];
        for (int j = 0; j < v; j++)
            col[j] = data + (j0 + j) / PANEL_VECTORS * panel_bytes(w) + (j0 + j) % PANEL_VECTORS * LANES * 4;
        if (w->kind == FD_BF16)
            run_bf16(col, (w->k + 1) / 2, (const bf16_input *)x, stride / 4, to + j0 * LANES, ahead, m, v);
        else
            run_f32(col, w->k, (const float *)x, stride / 4, to + j0 * LANES, ahead, m, v);
    }
}

#define ROW_BLOCK_BYTES (512 << 10) /* inputs that stay in the L2 cache while a member multiplies its panels */

/* Panels [first, last) of `rows` rows from `from` on. */
static void multiply_row_block(const fd_weight *w, const char *x, int from, int rows, int first, int last,
                               const epilogue *e) {
    long stride = row_bytes(w);
    const fd_tuning *tuning = find_tuning(rows);
    int v = rows <= ACCUMULATORS / 8 ? 8 : rows <= ACCUMULATORS / 4 ? 4 : 2;
    if (v > tuning->vectors) v = tuning->vectors;
    int max_height = ACCUMULATORS / v, tiles = (rows + max_height - 1) / max_height;
    int height = (rows + tiles - 1) / tiles;
    for (int panel = first, count; panel < last; panel += count) {
        count = v > PANEL_VECTORS ? v / PANEL_VECTORS : 1;
        while (count > last - panel) count /= 2;
        int vectors = v < count * PANEL_VECTORS ? v : count * PANEL_VECTORS;
        for (int r = 0; r < rows; r += height) {
            float to[12 * 4 * FD_PANEL];
            int m = rows - r < height ? rows - r : height;
            multiply_block(w, x + r * stride, stride, panel, count, m, vectors, tuning->prefetch, to);
            for (int i = 0; i < m; i++)
                for (int p = 0; p < count; p++)
                    apply_epilogue(e, panel + p, from + r + i, to + i * 4 * FD_PANEL + p * FD_PANEL);
        }
    }
}

/* Panels [first, last) of every row. */
static void multiply_panels(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    int tile = ACCUMULATORS / 2, block = (int)(ROW_BLOCK_BYTES / row_bytes(w)) / tile * tile;
    if (block < tile) block = tile;
    for (int r = 0; r < rows; r += block)
        multiply_row_block(w, x + r * row_bytes(w), r, rows - r < block ? rows - r : block, first, last, e);
}

INLINE int count_panels(const fd_weight *w) { return (w->n + FD_PANEL - 1) / FD_PANEL; }
INLINE int is_by_tiles(const fd_weight *w) { return HAS_TILES && w->kind == FD_BF16; }

/* Number of panels, of `panels` in all, that a member takes at a time. */
INLINE int choose_chunk(const fd_team *team, const fd_weight *w, int rows, int panels) {
    int chunk = (panels + team->size * 4 - 1) / (team->size * 4);
    int max_chunk = (int)(find_tuning(rows)->chunk_bytes / panel_bytes(w));
    if (max_chunk < 4) max_chunk = 4;
    return chunk < max_chunk ? chunk : max_chunk;
}

/* Panels [first, last) of every row. Tiles are configured before, if the product uses them. */
static void multiply_some(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    if (w->kind == FD_INT8 || w->kind == FD_INT4) quant_multiply(w, x, rows, first, last, e);
    else if (is_by_tiles(w)) multiply_panels_amx(w, x, rows, first, last, e);
    else multiply_panels(w, x, rows, first, last, e);
}

/* Panels [first, last) of every row, by one member. */
static void multiply_range(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    if (is_by_tiles(w)) begin_tiles(rows);
    multiply_some(w, x, rows, first, last, e);
    if (is_by_tiles(w)) tile_release();
}

/* The team shares a product; members take a few panels at a time. */
static void matmul(fd_team *team, const fd_weight *w, const char *x, int rows, const epilogue *e) {
    if (!rows) return;
    int panels = count_panels(w), chunk = choose_chunk(team, w, rows, panels);
    if (is_by_tiles(w)) begin_tiles(rows);
    for (int p; (p = fd_take(team, chunk)) < panels;)
        multiply_some(w, x, rows, p, p + chunk < panels ? p + chunk : panels, e);
    if (is_by_tiles(w)) tile_release();
}

#endif
