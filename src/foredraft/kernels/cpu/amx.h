/* Tiles of the processor: 8 registers of up to 16 rows of 64 bytes, with Intel's AMX or, for tests on processors that
 * have none, in plain C. The emulation aborts if the processor would raise a fault, or if a caller does not
 * release the tiles.
 */
#ifndef FD_AMX_H
#define FD_AMX_H

#include "simd.h"

#if defined(FD_AMX_EMULATED) || (defined(__AMX_TILE__) && defined(__AMX_BF16__))
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

enum { TILES = 8, TILE_ROWS = 16, TILE_BYTES = 64 };

/* What LDTILECFG reads: sizes of tiles 0 to 7, in rows and bytes of a row; the rest is zero. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Completes earlier stores: gcc's tile instructions do not declare the memory they read. */
INLINE void finish_stores(void) { __asm__ volatile("" : : : "memory"); }

#if HAS_TILES && !defined(FD_AMX_EMULATED)

INLINE void tile_configure(const tile_shapes *s) {
    /* gcc's tile instructions do not declare the memory they read: all earlier stores must be complete here */
    __asm__ volatile("" : : "r"(s) : "memory");
    _tile_loadconfig(s);
}
INLINE void tile_release(void) { _tile_release(); }
/* Tile numbers are part of the instruction, so these are macros. */
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)

#elif HAS_TILES

#include <stdlib.h>

static _Thread_local struct {
    tile_shapes shapes; /* palette 0 = not configured */
    uint8_t data[TILES][TILE_ROWS][TILE_BYTES];
} tiles;

static void require(int holds) {
    if (!holds) abort();
}

static void tile_configure(const tile_shapes *s) {
    require(tiles.shapes.palette == 0); /* the previous product must have released its tiles */
    require(s->palette == 1 && s->start_row == 0);
    for (int i = 0; i < 14; i++) require(s->reserved[i] == 0);
    for (int i = 0; i < 16; i++) {
        require(s->rows[i] <= (i < TILES ? TILE_ROWS : 0) && s->row_bytes[i] <= (i < TILES ? TILE_BYTES : 0));
        require(!s->rows[i] == !s->row_bytes[i]);
    }
    memset(&tiles, 0, sizeof tiles);
    tiles.shapes = *s;
}

static void tile_release(void) { memset(&tiles, 0, sizeof tiles); }

static int tile_rows(int t) {
    require(t >= 0 && t < TILES && tiles.shapes.palette == 1 && tiles.shapes.rows[t]);
    return tiles.shapes.rows[t];
}

static void tile_zero(int t) { memset(tiles.data[t], 0, sizeof tiles.data[t] * (tile_rows(t) > 0)); }

static void tile_load(int t, const void *from, long stride) {
    tile_zero(t);
    for (int i = 0; i < tile_rows(t); i++)
        memcpy(tiles.data[t][i], (const char *)from + i * stride, tiles.shapes.row_bytes[t]);
}

static void tile_store(int t, void *to, long stride) {
    for (int i = 0; i < tile_rows(t); i++)
        memcpy((char *)to + i * stride, tiles.data[t][i], tiles.shapes.row_bytes[t]);
}

/* The processor treats subnormal numbers as zero. */
static float flushed(float x) { return x > -0x1p-126f && x < 0x1p-126f ? 0 * x : x; }

static float bf16_at(const uint8_t *row, int i) {
    uint16_t h;
    memcpy(&h, row + 2 * i, 2);
    return flushed(bf16_to_float(h));
}

/* C += A B. Within a tile even k make one sum and odd k another, each by fused multiply-adds. */
static void tile_dot(int c, int a, int b) {
    const tile_shapes *s = &tiles.shapes;
    require(c != a && c != b && a != b);
    require(tile_rows(c) == tile_rows(a) && s->row_bytes[c] == s->row_bytes[b]);
    require(s->row_bytes[a] == 4 * tile_rows(b) && s->row_bytes[c] % 4 == 0);
    for (int m = 0; m < s->rows[c]; m++) {
        for (int n = 0; n < s->row_bytes[c] / 4; n++) {
            float sums[2] = {0, 0}, total;
            for (int k = 0; k < 2 * s->rows[b]; k++) {
                float x = bf16_at(tiles.data[a][m], k), w = bf16_at(tiles.data[b][k / 2], 2 * n + k % 2);
                sums[k % 2] = flushed(__builtin_fmaf(x, w, sums[k % 2]));
            }
            memcpy(&total, tiles.data[c][m] + 4 * n, 4);
            total = flushed(flushed(total) + flushed(sums[0] + sums[1]));
            memcpy(tiles.data[c][m] + 4 * n, &total, 4);
        }
    }
}

#endif
#endif
