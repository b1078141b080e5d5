/* A block of queries that share a key head, for attention_tiles.h: what its rows see, and packed queries. */
#ifndef FD_ATTENTION_BLOCK_H
#define FD_ATTENTION_BLOCK_H

#include "amx.h"
#include "attention_vectors.h"

#if HAS_TILES && defined(__AVX512BF16__)
#define HAS_TILE_ATTENTION 1

enum {
    BLOCK_QUERIES = 2 * TILE_ROWS,
    KEY_TILE = 32,                             /* keys of a tile of weights and values */
    TILE_WORDS = TILE_ROWS * TILE_BYTES / 4,
    QUERY_PADDING = 16,                        /* floats that keep queries off the same lines of the first cache */
    MAX_SCORE_BYTES = 16 << 20, /* of a member; with more queries in a block, fewer blocks read the keys again */
};

/* What a row sees, in ranks of its block. */
typedef struct {
    int from, to;
    int own; /* its own part, in whole tiles; `to` = it has none */
} row_range;

/* Queries of consecutive rows of one request. Ranks count from a multiple of KEY_TILE. */
typedef struct {
    const fd_attention *a;
    const fd_rows *rows;
    int first_row, num_rows, kv_head, first_head, heads; /* heads of every row */
    int base, lo, hi, padded; /* the sequence's rank 0 of the block; keys lo to hi - 1 are seen by some row; whole tiles */
    long stride;              /* floats from the scores of a query to those of the next */
    row_range ranges[BLOCK_QUERIES];
    int32_t *slots, *own_slots;     /* [padded] of the row with the most keys; of a row's own part */
    float *scales[2], *own_scales;  /* [padded] of int8 keys and values */
    float *scores; /* [queries, stride]; later, per query, [padded] bf16 weights and [padded] of the own part */
} query_block;

INLINE int round_up(int x, int step) { return (x + step - 1) / step * step; }
INLINE int count_queries(const query_block *b) { return b->num_rows * b->heads; }
INLINE int has_own_part(const query_block *b, int row) { return b->ranges[row].own < b->ranges[row].to; }
INLINE long find_stride(const query_block *b) {
    return slot_stride(b->a->kv_kind, b->a->kv_heads, b->a->head_dim);
}
/* Place of the key head's first number in the pool. */
INLINE long find_number(const query_block *b, int slot) {
    return slot * find_stride(b) + (long)b->kv_head * b->a->head_dim;
}
INLINE int query_head(const query_block *b, int query) {
    return b->kv_head * (b->a->heads / b->a->kv_heads) + b->first_head + query % b->heads;
}
/* Place of a query in `query` and `out`. */
INLINE long find_query(const query_block *b, int query) {
    return ((long)(b->first_row + query / b->heads) * b->a->heads + query_head(b, query)) * b->a->head_dim;
}
INLINE uint16_t *find_weights(const query_block *b, int query) { return (uint16_t *)(b->scores + query * b->stride); }

/* Slots of ranks `from` to `to`; the rest of their tiles gets the first and the last of them. */
static void fill_slots(const query_block *b, int row, int from, int to, int32_t *slots) {
    find_slots(b->rows, row, b->base + from, b->base + to, slots + from);
    for (int i = from / KEY_TILE * KEY_TILE; i < from; i++) slots[i] = slots[from];
    for (int i = to; i % KEY_TILE; i++) slots[i] = slots[to - 1];
}

static void fill_own_slots(const query_block *b, int row) {
    row_range range = b->ranges[row];
    fill_slots(b, b->first_row + row, range.own > range.from ? range.own : range.from, range.to, b->own_slots);
}

INLINE void fill_scales(const query_block *b, const void *pool, const int32_t *slots, int from, int to, float *scales) {
    for (int i = from; i < to; i++)
        scales[i] = *head_scale(pool, slots[i], b->a->kv_heads, b->a->head_dim, b->kv_head);
}

static void find_ranges(query_block *b) {
    const fd_rows *rows = b->rows;
    int longest = find_longest(rows, b->first_row, b->num_rows), lo = count_keys(rows, longest);
    for (int r = 0; r < b->num_rows; r++) {
        int from = first_key(b->a, b->first_row + r, count_keys(rows, b->first_row + r));
        if (from < lo) lo = from;
    }
    b->base = lo / KEY_TILE * KEY_TILE;
    b->lo = lo - b->base;
    b->hi = count_keys(rows, longest) - b->base;
    b->padded = round_up(b->hi, KEY_TILE);
    for (int r = 0; r < b->num_rows; r++) {
        int row = b->first_row + r, common = count_common(rows, row, longest), to = count_keys(rows, row);
        int from = first_key(b->a, row, to), own = rows->num_committed[row] + common, first = from > own ? from : own;
        if (common == rows->path_length[row]) first = to;
        else first = first / KEY_TILE * KEY_TILE;
        b->ranges[r] = (row_range){from - b->base, to - b->base, first - b->base};
    }
    fill_slots(b, longest, b->lo, b->hi, b->slots);
}

/* Whether a value that one of the rows does not see, but shares a tile with, is not finite: times its weight, zero, it
 * would be NaN. Codes are finite. */
static int has_infinite_values(const query_block *b) {
    const fd_attention *a = b->a;
    if (a->kv_kind != FD_KV_BF16 || b->num_rows == 1) return 0;
    int seen_from = b->lo, seen_to = b->hi, found = 0;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int r = 0; r < b->num_rows; r++) {
        row_range range = b->ranges[r];
        if (range.from > seen_from) seen_from = range.from;
        if (range.own < seen_to) seen_to = range.own;
        if (!has_own_part(b, r)) continue;
        fill_own_slots(b, r);
        for (int i = range.own; i < range.to; i++)
            for (int d = 0; d < a->head_dim; d += 32) {
                __m512i x = _mm512_loadu_si512((const uint16_t *)a->values + find_number(b, b->own_slots[i]) + d);
                found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent) != 0;
            }
    }
    for (int i = b->lo; i < b->hi; i++) {
        if (i >= seen_from && i < seen_to) continue;
        for (int d = 0; d < a->head_dim; d += 32) {
            __m512i x = _mm512_loadu_si512((const uint16_t *)a->values + find_number(b, b->slots[i]) + d);
            found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent) != 0;
        }
    }
    return found;
}

/* Four columns of 16 rows as four rows. */
INLINE void transpose_four(const float *from, long from_stride, float *to, long to_stride) {
    __m512 x[4];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        x[i] = _mm512_castps128_ps512(_mm_loadu_ps(from + i * from_stride));
        x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(from + (4 + i) * from_stride), 1);
        x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(from + (8 + i) * from_stride), 2);
        x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(from + (12 + i) * from_stride), 3);
    }
    __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), b = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
    __m512d c = (__m512d)_mm512_unpacklo_ps(x[2], x[3]), d = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    _mm512_storeu_ps(to, (__m512)_mm512_unpacklo_pd(a, c));
    _mm512_storeu_ps(to + to_stride, (__m512)_mm512_unpackhi_pd(a, c));
    _mm512_storeu_ps(to + 2 * to_stride, (__m512)_mm512_unpacklo_pd(b, d));
    _mm512_storeu_ps(to + 3 * to_stride, (__m512)_mm512_unpackhi_pd(b, d));
}

INLINE __m256i round_to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

/* Queries as factors of tiles: q[tile][step][pair of numbers][query]. */
static void pack_queries(const query_block *b, uint32_t *q) {
    const int dim = b->a->head_dim, steps = dim / 32, queries = count_queries(b);
    uint16_t rounded[TILE_ROWS * dim] __attribute__((aligned(64)));
    for (int t = 0; t * TILE_ROWS < queries; t++) {
        memset(rounded, 0, sizeof rounded);
        for (int j = 0; j < TILE_ROWS && t * TILE_ROWS + j < queries; j++) {
            const float *x = b->a->query + find_query(b, t * TILE_ROWS + j);
            for (int d = 0; d < dim; d += 16)
                _mm256_store_si256((__m256i *)(rounded + j * dim + d), round_to_bf16(_mm512_loadu_ps(x + d)));
        }
        finish_stores();
        for (int s = 0; s < steps; s++)
            for (int p = 0; p < 16; p += 4)
                transpose_four((const float *)(rounded + s * 32 + 2 * p), dim / 2,
                               (float *)(q + (t * steps + s) * TILE_WORDS + p * 16), 16);
    }
}

INLINE void set_shape(tile_shapes *s, int tile, int rows, int row_bytes) {
    s->rows[tile] = (uint8_t)(row_bytes ? rows : 0);
    s->row_bytes[tile] = (uint16_t)(rows ? row_bytes : 0);
}

/* Tiles 0 and 1, 2 and 3: scores of two tiles of keys, 4 and 5, with two tiles of queries, 6 and 7. */
static void configure_scores(int queries) {
    int first = queries < TILE_ROWS ? queries : TILE_ROWS, second = queries - first;
    tile_shapes s = {.palette = 1};
    for (int t = 0; t < TILES; t++) {
        int is_second = t == 2 || t == 3 || t == 7;
        set_shape(&s, t, TILE_ROWS, t == 4 || t == 5 ? TILE_BYTES : 4 * (is_second ? second : first));
    }
    tile_configure(&s);
}

/* Tiles 0 and 1, 2 and 3: sums of two tiles of weights, 4 and 5, or all of one, with values, 6 and 7. */
static void configure_values(int queries) {
    int first = queries < TILE_ROWS ? queries : TILE_ROWS, second = queries - first;
    tile_shapes s = {.palette = 1};
    for (int t = 0; t < TILES; t++) {
        int is_second = second && (t == 2 || t == 3 || t == 5);
        set_shape(&s, t, t > 5 ? TILE_ROWS : is_second ? second : first, TILE_BYTES);
    }
    tile_configure(&s);
}

#else
#define HAS_TILE_ATTENTION 0
#endif
#endif
