/* bf16 product with tiles of the processor.
 *
 * A packed panel has the processor's layout: a tile is 16 pairs of k times 16 outputs, with 128 bytes from row to row
 * and the panel's other half adjacent. The rest of k is added by vectors, in order. Each row of a tile is summed
 * separately, so its bits depend neither on other rows nor on their number.
 */
#ifndef FD_LINEAR_AMX_H
#define FD_LINEAR_AMX_H

#include "epilogue.h"
#include "foredraft.h"
#include "panel.h"
#include "simd.h"
#include "tile_sums.h"

#if HAS_TILES

/* Bytes of a weight that is likely in a cache. There prefetching costs time, and one row reads one panel after the other
 * faster than two in turns. */
enum { CACHED_BYTES = 4 << 20 };
/* Activations above MAX_ROW_BYTES do not stay in a core's second-level cache beside a panel. Then a group of panels stays
 * there instead, and every block of rows is read once for the group. */
enum { MAX_ROW_BYTES = 1 << 20, GROUP_BYTES = 512 << 10 };

/* Adds the pairs of k after the last whole tile to the sums of the tiles. */
static void add_tail(const tile_block *b, int i, int rows, int pairs, float *sums) {
    for (int r = 0; r < rows; r++) {
        const uint32_t *x = (const uint32_t *)(b->x[i] + r * b->stride), *w = (const uint32_t *)b->panel[i];
        for (int j = 0; j < FD_PANEL; j += LANES) {
            vf acc = load(sums + r * FD_PANEL + j);
            for (long k = (long)b->steps * STEP_PAIRS; k < pairs; k++)
                acc = dot_bf16(acc, load_words(w + k * FD_PANEL + j), broadcast_words(x[k]));
            store(sums + r * FD_PANEL + j, acc);
        }
    }
}

/* Writes result i of a block, without the rows that an earlier block has written. */
static void write_block(const fd_weight *w, const tile_block *b, int i, int height, int num_written, float *sums,
                        const epilogue *e) {
    int pairs = (w->k + 1) / 2;
    if (b->steps * STEP_PAIRS < pairs) add_tail(b, i, height, pairs, sums);
    for (int r = num_written; r < height; r++) apply_epilogue(e, b->number[i], b->row[i] + r, sums + r * FD_PANEL);
}

/* Number of panels that each block of rows meets before the next block of rows. */
INLINE int choose_group(const fd_weight *w, int rows) {
    if (rows * row_bytes(w) <= MAX_ROW_BYTES) return 1;
    long group = GROUP_BYTES / panel_bytes(w);
    return group > 1 ? (int)group : 2;
}

/* One or two tiles of rows from `r` on times `count` panels from `panel` on. */
INLINE void multiply_tiles(const fd_weight *w, const char *x, int rows, int r, int panel, int count, tile_block *b,
                           const epilogue *e) {
    float to[2][TILE_ROWS * FD_PANEL];
    int height = tile_height(rows), two_x = rows > TILE_ROWS, first_row[2] = {r, r + two_x * height};
    for (int i = 0; i < 2; i++) {
        /* the last tiles overlap earlier rows, because all tiles have one height */
        b->row[i] = first_row[i] < rows - height ? first_row[i] : rows - height;
        b->number[i] = panel + i * (count - 1);
        b->x[i] = x + b->row[i] * b->stride;
        b->panel[i] = (const char *)w->data + b->number[i] * panel_bytes(w);
    }
    if (rows <= MAX_FEW_ROWS && b->ahead) sum_few_rows(b, to, rows, count); /* in caches tiles are faster */
    else if (two_x) sum_tiles(b, to, 1, 0);
    else if (count > 1) sum_tiles(b, to, 0, 1);
    else sum_tiles(b, to, 0, 0);
    for (int i = 0; i < (two_x ? 2 : count); i++) write_block(w, b, i, height, first_row[i] - b->row[i], to[i], e);
}

/* Panels [first, last) of every row, between begin_tiles(rows) and tile_release. */
static void multiply_panels_amx(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    int two_x = rows > TILE_ROWS, block = (1 + two_x) * tile_height(rows);
    const fd_tuning *tuning = find_tuning(rows);
    tile_block b = {.stride = row_bytes(w), .steps = w->k / (2 * STEP_PAIRS)};
    int is_cached = 2l * w->n * w->k <= CACHED_BYTES;
    int by_pairs = !two_x && tuning->vectors > PANEL_VECTORS && !(is_cached && rows == 1);
    int group = by_pairs ? 2 : choose_group(w, rows);
    for (int from = first, count; from < last; from += group) {
        int to = from + group < last ? from + group : last;
        for (int r = 0; r < rows; r += block) {
            b.ahead = is_cached || r ? 0 : tuning->prefetch; /* later blocks find the panel in a cache */
            for (int panel = from; panel < to; panel += count) {
                count = by_pairs && to - panel > 1 ? 2 : 1;
                multiply_tiles(w, x, rows, r, panel, count, &b, e);
            }
        }
    }
}

#else

/* Never called. */
INLINE void begin_tiles(int rows) { (void)rows; }
INLINE void tile_release(void) {}
INLINE void multiply_panels_amx(const fd_weight *w, const char *x, int rows, int first, int last, const epilogue *e) {
    (void)w, (void)x, (void)rows, (void)first, (void)last, (void)e;
}

#endif
#endif
