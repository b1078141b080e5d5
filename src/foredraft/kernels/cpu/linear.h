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

/* A product of some rows with some vectors of outputs, over a part of the inputs. */
typedef struct {
    const char *col[8]; /* vectors of outputs; each advances by a panel's width per step */
    const char *x;      /* inputs of the first row, from the first step on */
    float *to;          /* [rows, to_stride] */
    long stride, to_stride, ahead; /* from row to row, in 4 bytes and in floats; prefetch distance in bytes */
    int steps, goes_on; /* goes_on: the sums begin with those in `to` */
} tile_job;

INLINE void begin_sums(const tile_job *t, vf *acc, const int M, const int V) {
    _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {
        _Pragma("GCC unroll 8") for (int j = 0; j < V; j++)
            acc[m * V + j] = t->goes_on ? load(t->to + m * t->to_stride + j * LANES) : (vf){0};
    }
}

INLINE void end_sums(const tile_job *t, const vf *acc, const int M, const int V) {
    _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {
        _Pragma("GCC unroll 8") for (int j = 0; j < V; j++) store(t->to + m * t->to_stride + j * LANES, acc[m * V + j]);
    }
}

/* M rows times V vectors of outputs. */
#define TILE(NAME, WORD, LOAD, BROADCAST, STEP)                                                                        \
    INLINE void NAME(const tile_job *t, const int M, const int V) {                                                    \
        vf acc[ACCUMULATORS];                                                                                          \
        const WORD *x = (const WORD *)t->x;                                                                            \
        const long stride = t->stride, ahead = t->ahead;                                                               \
        begin_sums(t, acc, M, V);                                                                                      \
        for (int k = 0; k < t->steps; k++) {                                                                           \
            if (ahead) prefetch_step(t->col, k, ahead, V);                                                             \
            _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {                                                     \
                _Pragma("GCC unroll 8") for (int j = 0; j < V; j++)                                                    \
                    acc[m * V + j] = STEP(acc[m * V + j], LOAD((const WORD *)t->col[j] + (long)k * FD_PANEL),          \
                                          BROADCAST(x[m * stride + k]));                                               \
            }                                                                                                          \
        }                                                                                                              \
        end_sums(t, acc, M, V);                                                                                        \
    }

#define MULTIPLY_ADD(acc, w, x) multiply_add(w, x, acc)
TILE(tile_f32, float, load, broadcast, MULTIPLY_ADD)
#if HAS_BF16_PRODUCTS
TILE(tile_bf16, uint32_t, load_words, broadcast_words, dot_bf16)
#else
/* The additions of `dot_bf16`. One half of all pairs comes after the other, so its vectors stay in registers. */
INLINE void tile_bf16(const tile_job *t, const int M, const int V) {
    vf acc[ACCUMULATORS];
    const float *x = (const float *)t->x;
    const long stride = t->stride, ahead = t->ahead;
    begin_sums(t, acc, M, V);
    for (int k = 0; k < t->steps; k++) {
        if (ahead) prefetch_step(t->col, k, ahead, V);
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            vf w[8];
            _Pragma("GCC unroll 8") for (int j = 0; j < V; j++) {
                vu words = load_words((const uint32_t *)t->col[j] + (long)k * FD_PANEL);
                w[j] = (vf)(half ? words & 0xffff0000u : words << 16);
            }
            _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {
                vf value = broadcast(x[m * stride + 2 * k + half]);
                _Pragma("GCC unroll 8") for (int j = 0; j < V; j++)
                    acc[m * V + j] = multiply_add(w[j], value, acc[m * V + j]);
            }
        }
    }
    end_sums(t, acc, M, V);
}
#endif

#define CASES(TILE_, V, M)                                                                                             \
    case (V) * 16 + (M):                                                                                               \
        TILE_(t, M, V);                                                                                                \
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

static void run_bf16(const tile_job *t, int m, int v) {
    switch (v * 16 + m) { ALL_CASES(tile_bf16) }
}
static void run_f32(const tile_job *t, int m, int v) {
    switch (v * 16 + m) { ALL_CASES(tile_f32) }
}

INLINE int count_steps(const fd_weight *w) { return w->kind == FD_BF16 ? (w->k + 1) / 2 : w->k; }
/* Bytes of a row's inputs of one step. */
INLINE int step_bytes(const fd_weight *w) { return w->kind == FD_BF16 ? 2 * (int)sizeof(rounded) : 4; }

#define ROW_BLOCK_BYTES (512 << 10) /* inputs that stay in the L2 cache while a member multiplies its panels */
enum {
    MAX_BLOCK_ROWS = 96, /* a multiple of a tile's rows; their sums stay in the L1 cache */
    BLOCK_STEPS = 64,    /* at a time where a panel needs several tiles: otherwise all of it is fetched for the first one,
                          * which waits for memory, and the others wait for arithmetic */
};

/* How some rows are divided among tiles. */
typedef struct {
    int rows, height, vectors, block; /* rows in all and of a tile; vectors of a tile; steps at a time */
} tiling;

INLINE tiling choose_tiling(const fd_weight *w, int rows) {
    int v = rows <= ACCUMULATORS / 8 ? 8 : rows <= ACCUMULATORS / 4 ? 4 : 2;
    if (v > find_tuning(rows)->vectors) v = find_tuning(rows)->vectors;
    int max_height = ACCUMULATORS / v, tiles = (rows + max_height - 1) / max_height;
    return (tiling){rows, (rows + tiles - 1) / tiles, v, v < PANEL_VECTORS ? BLOCK_STEPS : count_steps(w)};
}

/* Sums of `count` panels from `panel` on, over the steps from `first` on, for all rows: [rows, count * FD_PANEL]. */
static void add_up_panels(const fd_weight *w, const char *x, tiling shape, int panel, int count, int first, float *sums) {
    const long stride = row_bytes(w), size = panel_bytes(w);
    const char *data = (const char *)w->data + panel * size + (long)first * FD_PANEL * 4;
    int left = count_steps(w) - first, all = count * PANEL_VECTORS, v = shape.vectors < all ? shape.vectors : all;
    tile_job t = {.stride = stride / 4, .to_stride = count * FD_PANEL, .ahead = find_tuning(shape.rows)->prefetch,
                  .steps = left < shape.block ? left : shape.block, .goes_on = first > 0};
    for (int r = 0; r < shape.rows; r += shape.height) {
        int m = shape.rows - r < shape.height ? shape.rows - r : shape.height;
        t.x = x + r * stride + (long)first * step_bytes(w);
        for (int j0 = 0; j0 < all; j0 += v) {
            for (int j = 0; j < v; j++)
                t.col[j] = data + (j0 + j) / PANEL_VECTORS * size + (j0 + j) % PANEL_VECTORS * LANES * 4;
            t.to = sums + r * t.to_stride + j0 * LANES;
            if (w->kind == FD_BF16) run_bf16(&t, m, v);
            else run_f32(&t, m, v);
        }
    }
}

/* Panels [first, last) of `rows` rows from `from` on. */
static void multiply_row_block(const fd_weight *w, const char *x, int from, int rows, int first, int last,
                               const epilogue *e) {
    tiling shape = choose_tiling(w, rows);
    for (int panel = first, count; panel < last; panel += count) {
        float sums[MAX_BLOCK_ROWS * FD_PANEL];
        count = shape.vectors > PANEL_VECTORS ? shape.vectors / PANEL_VECTORS : 1;
        while (count > last - panel) count /= 2;
        for (int k = 0; k < count_steps(w); k += shape.block) add_up_panels(w, x, shape, panel, count, k, sums);
        for (int i = 0; i < rows; i++)
            for (int p = 0; p < count; p++)
                apply_epilogue(e, panel + p, from + i, sums + (i * count + p) * FD_PANEL);
    }
}

/* Panels [first, last) of every row. */
static void multiply_panels(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    int tile = ACCUMULATORS / 2, block = (int)(ROW_BLOCK_BYTES / row_bytes(w)) / tile * tile;
    if (block > MAX_BLOCK_ROWS) block = MAX_BLOCK_ROWS;
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
