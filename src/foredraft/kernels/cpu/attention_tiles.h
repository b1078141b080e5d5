/* Attention of up to 32 queries that share a key head, with tiles of the processor: queries of one row or of several rows
 * of one request. Every key and value is read and converted once for all of them.
 *
 * A tile of keys has the ranks 16 i to 16 i + 15 of the sequence, a tile of values the ranks 32 i to 32 i + 31, and no
 * number depends on the other queries, so a row's bits are the same whatever rows are beside it. Scores of keys that a
 * row does not see are replaced; their weights are zero and add nothing to a sum. Ranks at which the rows of a token
 * tree see different keys, their own parts, are computed row by row.
 */
#ifndef FD_ATTENTION_TILES_H
#define FD_ATTENTION_TILES_H

#include "attention_block.h"

#if HAS_TILE_ATTENTION

enum { PREFETCH_VALUES = 16 }; /* keys ahead */

/* 16 keys in bf16. */
typedef struct {
    const char *at;
    long stride; /* bytes */
} key_rows;

INLINE int are_adjacent(const int32_t *slots) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i run = _mm512_add_epi32(_mm512_set1_epi32(slots[0]), steps);
    return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(slots), run) == 0;
}

/* Keys at adjacent slots are read in place, others copied. */
INLINE key_rows read_keys(const query_block *b, const int32_t *slots, uint16_t *copy, const int kind) {
    const int dim = b->a->head_dim;
    if (kind == FD_KV_BF16 && are_adjacent(slots)) {
        const uint16_t *keys = b->a->keys;
        return (key_rows){(const char *)(keys + find_number(b, slots[0])), 2 * find_stride(b)};
    }
    for (int i = 0; i < TILE_ROWS; i++)
        for (int d = 0; d < dim; d += 32)
            _mm512_storeu_si512(copy + i * dim + d, load_pairs(b->a->keys, find_number(b, slots[i]) + d, kind));
    return (key_rows){(const char *)copy, 2l * dim};
}

/* Scores of KEY_TILE keys, to[i + 2 j] of 16 keys i and 16 queries j. */
INLINE void sum_scores(const query_block *b, const int32_t *slots, const uint32_t *q, float to[4][TILE_WORDS],
                       const int kind, const int two) {
    const int dim = b->a->head_dim, steps = dim / 32;
    uint16_t copy[2 * TILE_ROWS * dim] __attribute__((aligned(64)));
    key_rows k0 = read_keys(b, slots, copy, kind), k1 = read_keys(b, slots + TILE_ROWS, copy + TILE_ROWS * dim, kind);
    finish_stores();
    tile_zero(0);
    tile_zero(1);
    if (two) {
        tile_zero(2);
        tile_zero(3);
    }
    for (int s = 0; s < steps; s++) {
        tile_load(6, q + s * TILE_WORDS, TILE_BYTES);
        tile_load(4, k0.at + s * TILE_BYTES, k0.stride);
        tile_dot(0, 4, 6);
        tile_load(5, k1.at + s * TILE_BYTES, k1.stride);
        tile_dot(1, 5, 6);
        if (!two) continue;
        tile_load(7, q + (steps + s) * TILE_WORDS, TILE_BYTES);
        tile_dot(2, 4, 7);
        tile_dot(3, 5, 7);
    }
    tile_store(0, to[0], TILE_BYTES);
    tile_store(1, to[1], TILE_BYTES);
    if (two) {
        tile_store(2, to[2], TILE_BYTES);
        tile_store(3, to[3], TILE_BYTES);
    }
    finish_stores();
}

/* Prefetches 16 keys: pages' keys fall on few lines of the first cache, so more would drive each other out. */
INLINE void prefetch_slots(const query_block *b, const void *pool, const int32_t *slots, const int kind) {
    const char *first = (const char *)pool + find_number(b, 0) * number_bytes(kind);
    const long stride = find_stride(b) * number_bytes(kind);
    for (int line = 0; line < b->a->head_dim * number_bytes(kind); line += 64) {
        _Pragma("GCC unroll 16") for (int i = 0; i < TILE_ROWS; i++)
            __builtin_prefetch(first + slots[i] * stride + line);
    }
    for (int i = 0; i < TILE_ROWS && kind == FD_KV_INT8; i++) /* slots of codes start anywhere in a line */
        __builtin_prefetch(first + slots[i] * stride + b->a->head_dim - 1);
}

/* Scores of a row's own part. */
INLINE void score_own_part(const query_block *b, int row, const uint32_t *q, const int kind, const int two) {
    float sums[4][TILE_WORDS];
    row_range range = b->ranges[row];
    fill_own_slots(b, row);
    for (int rank = range.own; rank < range.to; rank += KEY_TILE) {
        sum_scores(b, b->own_slots + rank, q, sums, kind, two);
        for (int j = row * b->heads; j < (row + 1) * b->heads; j++)
            for (int i = 0; i < KEY_TILE; i++)
                b->scores[j * b->stride + rank + i] =
                    sums[i / TILE_ROWS + j / TILE_ROWS * 2][i % TILE_ROWS * TILE_ROWS + j % TILE_ROWS];
    }
}

INLINE void write_scores(const query_block *b, float sums[4][TILE_WORDS], int rank) {
    for (int j = 0; j < count_queries(b); j += 4) {
        const float *from = sums[j / TILE_ROWS * 2] + j % TILE_ROWS;
        float *to = b->scores + j * b->stride + rank;
        transpose_four(from, TILE_ROWS, to, b->stride);
        transpose_four(from + TILE_WORDS, TILE_ROWS, to + TILE_ROWS, b->stride);
    }
}

INLINE void score_tiles(const query_block *b, const uint32_t *q, const int kind, const int two) {
    float sums[2][4][TILE_WORDS] __attribute__((aligned(64)));
    for (int rank = 0; rank < b->padded; rank += KEY_TILE) {
        int i = rank / KEY_TILE & 1;
        int has_next = rank + KEY_TILE < b->padded;
        if (has_next) prefetch_slots(b, b->a->keys, b->slots + rank + KEY_TILE, kind);
        sum_scores(b, b->slots + rank, q, sums[i], kind, two);
        if (has_next) prefetch_slots(b, b->a->keys, b->slots + rank + KEY_TILE + TILE_ROWS, kind);
        if (rank) write_scores(b, sums[!i], rank - KEY_TILE); /* the tiles just stored are not yet in the cache */
    }
    write_scores(b, sums[b->padded / KEY_TILE & 1 ? 0 : 1], b->padded - KEY_TILE);
    for (int r = 0; r < b->num_rows; r++)
        if (has_own_part(b, r)) score_own_part(b, r, q, kind, two);
}

static void score_block(const query_block *b) {
    uint32_t q[2 * b->a->head_dim / 32 * TILE_WORDS] __attribute__((aligned(64)));
    int queries = count_queries(b), kind = b->a->kv_kind;
    prefetch_slots(b, b->a->keys, b->slots, kind);
    pack_queries(b, q);
    configure_scores(queries);
    if (kind == FD_KV_INT8 && queries > TILE_ROWS) score_tiles(b, q, FD_KV_INT8, 1);
    else if (kind == FD_KV_INT8) score_tiles(b, q, FD_KV_INT8, 0);
    else if (queries > TILE_ROWS) score_tiles(b, q, FD_KV_BF16, 1);
    else score_tiles(b, q, FD_KV_BF16, 0);
    tile_release();
    prefetch_slots(b, b->a->values, b->slots, kind);
}

/* Values of KEY_TILE keys and 16 T columns from `d` on, as T tiles, in the order of the processor's interleaving. Columns
 * after the head, and ranks before `lo` and from `hi` on, are zero. Values of slots[i + ahead] are prefetched. */
INLINE void pack_values(const query_block *b, const int32_t *slots, int lo, int hi, int ahead, int d, uint16_t *to,
                        const int kind, const int T) {
    const char *pool = (const char *)b->a->values + (find_number(b, 0) + d) * number_bytes(kind);
    const long stride = find_stride(b) * number_bytes(kind);
    const int T_fitting = T > 2 && d + 32 >= b->a->head_dim ? 2 : T;
    for (int i = 0; i < KEY_TILE; i += 2) {
        const char *x_at = pool + slots[i] * stride, *y_at = pool + slots[i + 1] * stride;
        int has_x = i >= lo && i < hi, has_y = i + 1 >= lo && i + 1 < hi;
        _Pragma("GCC unroll 2") for (int t = 0; t < T; t += 2) {
            __m512i x = t < T_fitting && has_x ? load_pairs(x_at, 16 * t, kind) : _mm512_setzero_si512();
            __m512i y = t < T_fitting && has_y ? load_pairs(y_at, 16 * t, kind) : _mm512_setzero_si512();
            _mm512_store_si512(to + (t * 32 + i) * 16, _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to + ((t + 1) * 32 + i) * 16, _mm512_unpackhi_epi16(x, y));
            if (t * number_bytes(kind) * 16 % 64 == 0) {
                __builtin_prefetch(pool + slots[i + ahead] * stride + t * 16 * number_bytes(kind));
                __builtin_prefetch(pool + slots[i + 1 + ahead] * stride + t * 16 * number_bytes(kind));
            }
            if (kind == FD_KV_INT8 && t + 2 == T) {
                __builtin_prefetch(pool + slots[i + ahead] * stride + 16 * T - 1);
                __builtin_prefetch(pool + slots[i + 1 + ahead] * stride + 16 * T - 1);
            }
        }
    }
}

/* Values of the block's keys from `rank` on. */
INLINE void pack_tile(const query_block *b, int rank, int d, uint16_t *to, const int kind, const int T) {
    int lo = b->lo - rank, hi = b->hi - rank, ahead = rank + KEY_TILE < b->padded ? PREFETCH_VALUES : 0;
    if (lo <= 0 && hi >= KEY_TILE) pack_values(b, b->slots + rank, 0, KEY_TILE, ahead, d, to, kind, T);
    else pack_values(b, b->slots + rank, lo, hi, ahead, d, to, kind, T);
}

/* Adds weights [queries, KEY_TILE] times packed values to the sums: 32 columns of two tiles of queries, or 64 of one. */
INLINE void add_values(const uint16_t *weights, long stride, const uint16_t *values, const int two) {
    const char *first = (const char *)weights;
    finish_stores();
    tile_load(4, first, stride);
    tile_load(6, values, TILE_BYTES);
    tile_dot(0, 4, 6);
    tile_load(7, values + 2 * TILE_WORDS, TILE_BYTES);
    tile_dot(1, 4, 7);
    if (two) {
        tile_load(5, first + TILE_ROWS * stride, stride);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    } else {
        tile_load(6, values + 4 * TILE_WORDS, TILE_BYTES);
        tile_dot(2, 4, 6);
        tile_load(7, values + 6 * TILE_WORDS, TILE_BYTES);
        tile_dot(3, 4, 7);
    }
}

/* Adds the values of a row's own part. */
INLINE void add_own_part(const query_block *b, int row, int d, const int kind, const int two) {
    uint16_t values[8 * TILE_WORDS] __attribute__((aligned(64)));
    uint16_t weights[BLOCK_QUERIES * KEY_TILE] __attribute__((aligned(64))) = {0};
    row_range range = b->ranges[row];
    fill_own_slots(b, row);
    for (int rank = range.own; rank < range.to; rank += KEY_TILE) {
        pack_values(b, b->own_slots + rank, range.from - rank, range.to - rank, 0, d, values, kind,
                    two ? 2 : 4);
        for (int j = row * b->heads; j < (row + 1) * b->heads; j++)
            memcpy(weights + j * KEY_TILE, find_weights(b, j) + b->padded + rank, TILE_BYTES);
        add_values(weights, TILE_BYTES, values, two);
    }
}

/* Sums 32 columns of two tiles of queries, or 64 of one. */
INLINE void sum_columns(const query_block *b, int d, const int kind, const int two) {
    uint16_t values[2][8 * TILE_WORDS] __attribute__((aligned(64)));
    const int columns = two ? 2 : 4;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    pack_tile(b, 0, d, values[0], kind, columns);
    for (int rank = 0; rank < b->padded; rank += KEY_TILE) {
        int i = rank / KEY_TILE & 1, next = rank + KEY_TILE;
        if (next < b->padded) pack_tile(b, next, d, values[!i], kind, columns);
        add_values(find_weights(b, 0) + rank, 4 * b->stride, values[i], two);
    }
    for (int r = 0; r < b->num_rows; r++)
        if (has_own_part(b, r)) add_own_part(b, r, d, kind, two);
}

/* Writes 32 columns of the queries of a tile; `sums` are two tiles in the interleaving order. */
INLINE void write_columns(const query_block *b, float sums[2][TILE_WORDS], int first_query, int d) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    int queries = count_queries(b);
    for (int j = 0; j < TILE_ROWS && first_query + j < queries; j++) {
        float *out = b->a->out + find_query(b, first_query + j) + d;
        __m512 low = _mm512_load_ps(sums[0] + j * 16), high = _mm512_load_ps(sums[1] + j * 16);
        _mm512_storeu_ps(out, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(low, second, high));
    }
}

INLINE void sum_tile_values(const query_block *b, const int kind, const int two) {
    float sums[4][TILE_WORDS] __attribute__((aligned(64)));
    for (int d = 0; d < b->a->head_dim; d += two ? 32 : 64) {
        sum_columns(b, d, kind, two);
        tile_store(0, sums[0], TILE_BYTES);
        tile_store(1, sums[1], TILE_BYTES);
        tile_store(2, sums[2], TILE_BYTES);
        tile_store(3, sums[3], TILE_BYTES);
        finish_stores();
        write_columns(b, sums, 0, d);
        if (two) write_columns(b, sums + 2, TILE_ROWS, d);
        else if (d + 32 < b->a->head_dim) write_columns(b, sums + 2, 0, d + 32);
    }
}

static void add_up_block(const query_block *b) {
    int queries = count_queries(b), kind = b->a->kv_kind;
    configure_values(queries);
    if (kind == FD_KV_INT8 && queries > TILE_ROWS) sum_tile_values(b, FD_KV_INT8, 1);
    else if (kind == FD_KV_INT8) sum_tile_values(b, FD_KV_INT8, 0);
    else if (queries > TILE_ROWS) sum_tile_values(b, FD_KV_BF16, 1);
    else sum_tile_values(b, FD_KV_BF16, 0);
    tile_release();
}

#endif
#endif
