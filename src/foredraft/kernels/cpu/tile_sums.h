/* Sums of a product of bf16 with tiles: up to 16 rows of activations times 16 outputs, 32 values of k at a time.
 *
 * Within a tile even k make one sum and odd k another, each by fused multiply-adds, and both are added to the result;
 * subnormal numbers are zero. `sum_few_rows` does the same by vectors, with the same bits: the processor keeps too few
 * loads of tiles in flight to use all of the memory's bandwidth, and few rows need no more.
 */
#ifndef FD_TILE_SUMS_H
#define FD_TILE_SUMS_H

#include "amx.h"
#include "panel.h"
#include "simd.h"

#if HAS_TILES

enum { PAIR_BYTES = FD_PANEL * 4, STEP_PAIRS = 16 }; /* bytes of a pair of k in a panel; pairs of a tile */
#if defined(__x86_64__)
enum { MAX_FEW_ROWS = 2, MAX_SUMS = 2 * PANEL_VECTORS }; /* rows that are summed by vectors; their sums */
#else
enum { MAX_FEW_ROWS = 0 };
#endif

/* All tiles of a product have one height, so tiles are configured once. More rows than one tile use pairs of tiles. */
INLINE int tile_height(int rows) {
    int tiles = rows <= TILE_ROWS ? 1 : (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * 2;
    return (rows + tiles - 1) / tiles;
}

/* Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights. */
static void begin_tiles(int rows) {
    tile_shapes s = {.palette = 1};
    for (int t = 0; t < TILES; t++) {
        s.rows[t] = (uint8_t)(t < 6 ? tile_height(rows) : STEP_PAIRS);
        s.row_bytes[t] = TILE_BYTES;
    }
    tile_configure(&s);
}

typedef struct {
    const char *x[2], *panel[2]; /* factors of the block's two results */
    int row[2], number[2];       /* index of the first row; index of the panel */
    long stride;                 /* bytes between rows */
    int steps;                   /* whole tiles of k */
    long ahead;                  /* bytes of a panel to prefetch ahead; 0 = none */
} tile_block;

enum { NEAR_TILE_BYTES = 2 * STEP_PAIRS * PAIR_BYTES }; /* from the second cache to the first one */

/* Fetches what is read `ahead` bytes later into the second cache, and what is read soon into the first one. */
INLINE void prefetch_tile_pair(const char *w, long ahead) {
    _Pragma("GCC unroll 32") for (int i = 0; i < STEP_PAIRS * PAIR_BYTES; i += 64) {
        __builtin_prefetch(w + ahead + i, 0, 2);
        __builtin_prefetch(w + NEAR_TILE_BYTES + i, 0, 3);
    }
}

/* A tile of rows times a panel, with a second tile of rows or a second panel; to[i] is [16, 32]. */
INLINE void sum_tiles(const tile_block *b, float to[2][TILE_ROWS * FD_PANEL], const int two_x, const int two_panels) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (long s = 0; s < b->steps; s++) {
        const char *w = b->panel[0] + s * STEP_PAIRS * PAIR_BYTES;
        if (b->ahead) prefetch_tile_pair(w, b->ahead);
        tile_load(4, b->x[0] + s * TILE_BYTES, b->stride);
        tile_load(6, w, PAIR_BYTES);
        tile_dot(0, 4, 6);
        tile_load(7, w + TILE_BYTES, PAIR_BYTES);
        tile_dot(1, 4, 7);
        if (two_x) {
            tile_load(5, b->x[1] + s * TILE_BYTES, b->stride);
            tile_dot(2, 5, 6);
            tile_dot(3, 5, 7);
        }
        if (two_panels) {
            w = b->panel[1] + s * STEP_PAIRS * PAIR_BYTES;
            if (b->ahead) prefetch_tile_pair(w, b->ahead);
            tile_load(6, w, PAIR_BYTES);
            tile_dot(2, 4, 6);
            tile_load(7, w + TILE_BYTES, PAIR_BYTES);
            tile_dot(3, 4, 7);
        }
    }
    tile_store(0, to[0], PAIR_BYTES);
    tile_store(1, to[0] + TILE_BYTES / 4, PAIR_BYTES);
    tile_store(2, to[1], PAIR_BYTES);
    tile_store(3, to[1] + TILE_BYTES / 4, PAIR_BYTES);
}

#if defined(__x86_64__)

/* Counts subnormal numbers as zero, as tiles do. Sums between begin and end have to be read and written in between. */
INLINE unsigned begin_flushing(void) {
    enum { FLUSHES_RESULTS = 1 << 15, FLUSHES_OPERANDS = 1 << 6 };
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSHES_RESULTS | FLUSHES_OPERANDS);
    __asm__ volatile("" : : : "memory");
    return before;
}
INLINE void end_flushing(unsigned before) {
    __asm__ volatile("" : : : "memory");
    _mm_setcsr(before);
}

/* M rows times V vectors of outputs at `col`; to[j] is the first of M results, FD_PANEL apart. */
INLINE void sum_vectors(const tile_block *b, const char *const *col, float *const *to, const int M, const int V) {
    const uint32_t *x = (const uint32_t *)b->x[0];
    const long stride = b->stride / 4;
    vf total[MAX_SUMS], even[MAX_SUMS], odd[MAX_SUMS];
    _Pragma("GCC unroll 8") for (int i = 0; i < M * V; i++) total[i] = (vf){0};
    for (int k = 0; k < b->steps * STEP_PAIRS;) {
        _Pragma("GCC unroll 8") for (int i = 0; i < M * V; i++) even[i] = odd[i] = (vf){0};
        for (int end = k + STEP_PAIRS; k < end; k++) {
            prefetch_step(col, k, b->ahead, V);
            _Pragma("GCC unroll 2") for (int m = 0; m < M; m++) {
                vu pair = broadcast_words(x[m * stride + k]);
                _Pragma("GCC unroll 8") for (int j = 0; j < V; j++) {
                    vu w = load_words((const uint32_t *)(col[j] + (long)k * PAIR_BYTES));
                    vf *sums[2] = {even + m * V + j, odd + m * V + j};
                    *sums[0] = multiply_add((vf)(w << 16), (vf)(pair << 16), *sums[0]);
                    *sums[1] = multiply_add((vf)(w & 0xffff0000u), (vf)(pair & 0xffff0000u), *sums[1]);
                }
            }
        }
        _Pragma("GCC unroll 8") for (int i = 0; i < M * V; i++) total[i] += even[i] + odd[i];
    }
    for (int i = 0; i < M * V; i++) store(to[i % V] + i / V * FD_PANEL, total[i]);
}

/* One or two rows times `count` panels, two at most; to[i] is [rows, FD_PANEL]. */
static void sum_few_rows(const tile_block *b, float to[2][TILE_ROWS * FD_PANEL], int rows, int count) {
    const char *col[2 * PANEL_VECTORS];
    float *sums[2 * PANEL_VECTORS];
    for (int j = 0; j < count * PANEL_VECTORS; j++) {
        int panel = j / PANEL_VECTORS, lane = j % PANEL_VECTORS * LANES;
        col[j] = b->panel[panel] + lane * 4;
        sums[j] = to[panel] + lane;
    }
    unsigned before = begin_flushing();
    if (rows == 1 && count == 2) sum_vectors(b, col, sums, 1, 2 * PANEL_VECTORS);
    else
        for (int i = 0; i < count * PANEL_VECTORS; i += PANEL_VECTORS)
            if (rows == 1) sum_vectors(b, col + i, sums + i, 1, PANEL_VECTORS);
            else sum_vectors(b, col + i, sums + i, 2, PANEL_VECTORS);
    end_flushing(before);
}

#else

INLINE void sum_few_rows(const tile_block *b, float to[2][TILE_ROWS * FD_PANEL], int rows, int count) {
    (void)b, (void)to, (void)rows, (void)count; /* never called */
}

#endif

#endif
#endif
