/* Attention of a block of rows by floats: a chunk of keys or values is converted once and meets all rows while it is in the
 * first cache, with the sums of `attend_float`. */
#ifndef FD_ATTENTION_FLOATS_H
#define FD_ATTENTION_FLOATS_H

#include "row_block.h"
#include "transpose.h"

enum { CHUNK_KEYS = 32 };

/* A chunk's keys and values lie in their order. */
static const int32_t PLACES[CHUNK_KEYS + KEY_BLOCK] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
    24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
};

/* Keys or values from rank `first` on as floats, [<= CHUNK_KEYS, dim]; codes without their scales. Returns the rank after
 * the last. */
INLINE int widen_chunk(const row_block *b, const void *pool, int first, float *to, const int kind) {
    const int dim = b->a->head_dim, last = first + CHUNK_KEYS < b->hi ? first + CHUNK_KEYS : b->hi;
    const long stride = slot_stride(kind, b->a->kv_heads, dim), head = (long)b->kv_head * dim;
    for (int rank = first; rank < last; rank++, to += dim) {
        long at = b->slots[rank - b->lo] * stride + head;
        for (int d = 0; d < dim; d += LANES) store(to + d, load_kv(pool, at + d, kind));
    }
    return last;
}

/* Prefetches a share of the chunk from rank `first` on, one share per row, so that it arrives while the chunk before it
 * meets the rows. */
INLINE void prefetch_share(const row_block *b, const void *pool, int first, int row, const int kind) {
    const int dim = b->a->head_dim, share = (CHUNK_KEYS + b->num_rows - 1) / b->num_rows;
    const long stride = slot_stride(kind, b->a->kv_heads, dim), head = (long)b->kv_head * dim;
    int from = first + row * share, to = from + share < b->hi ? from + share : b->hi;
    if (to > first + CHUNK_KEYS) to = first + CHUNK_KEYS;
    for (; from < to; from++) prefetch_head(pool, b->slots[from - b->lo] * stride + head, dim, kind);
}

#define SCORE_ROW(G, POOL, SLOTS, STRIDE, HEAD, KIND)                                                                  \
    case G:                                                                                                            \
        score_keys(q, POOL, SLOTS, count, STRIDE, HEAD, dim, KIND, to, b->ranks, G);                                   \
        break;
#define SCORE_ALL(...)                                                                                                 \
    switch (b->heads) {                                                                                                \
        SCORE_ROW(1, __VA_ARGS__) SCORE_ROW(2, __VA_ARGS__) SCORE_ROW(3, __VA_ARGS__) SCORE_ROW(4, __VA_ARGS__)        \
    }

#if LANES == 16
/* `score_keys` of H heads of D vectors, which stay in registers. */
INLINE void score_wide(const float *q, const float *keys, int count, float *to, long to_stride, const int H,
                       const int D) {
    vf query[16], part[HEAD_BLOCK][KEY_BLOCK];
    _Pragma("GCC unroll 16") for (int i = 0; i < H * D; i++) query[i] = load(q + i * LANES);
    for (int i = 0; i < KEY_BLOCK; i++) {
        const float *key = keys + (i < count ? i : count - 1) * D * LANES;
        vf acc[HEAD_BLOCK];
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) acc[h] = (vf){0};
        _Pragma("GCC unroll 8") for (int d = 0; d < D; d++) {
            vf k = load(key + d * LANES);
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) acc[h] = multiply_add(k, query[h * D + d], acc[h]);
        }
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) part[h][i] = acc[h];
    }
    for (int h = 0; h < H; h++) reduce_sum_16(part[h], to + h * to_stride);
}

/* Scores of up to KEY_BLOCK keys for `heads` heads of 64 or 128 numbers. Returns whether the head has such a width. */
INLINE int score_common_width(const float *q, const float *keys, int count, int dim, float *to, long to_stride,
                              int heads) {
    if (dim == 4 * LANES) {
        switch (heads) {
        case 1: score_wide(q, keys, count, to, to_stride, 1, 4); break;
        case 2: score_wide(q, keys, count, to, to_stride, 2, 4); break;
        case 3: score_wide(q, keys, count, to, to_stride, 3, 4); break;
        case 4: score_wide(q, keys, count, to, to_stride, 4, 4); break;
        }
        return 1;
    }
    if (dim != 8 * LANES) return 0;
    for (; heads >= 2; heads -= 2, q += 2 * dim, to += 2 * to_stride)
        score_wide(q, keys, count, to, to_stride, 2, 8);
    if (heads) score_wide(q, keys, count, to, to_stride, 1, 8);
    return 1;
}

/* Scores of a row and the keys of a chunk that begins with rank `first`. */
static void score_chunk(const row_block *b, int row, const float *keys, int first, row_part seen) {
    const float *q = b->a->query + find_row(b, row);
    const int dim = b->a->head_dim;
    float *to = find_scores(b, row, 0) + seen.from - b->parts[row].from;
    for (int rank = seen.from; rank < seen.to; rank += KEY_BLOCK, to += KEY_BLOCK) {
        int count = seen.to - rank < KEY_BLOCK ? seen.to - rank : KEY_BLOCK;
        if (score_common_width(q, keys + (rank - first) * dim, count, dim, to, b->ranks, b->heads)) continue;
        SCORE_ALL(keys, PLACES + rank - first, dim, 0, FD_KV_F32)
    }
}

INLINE void convert_keys(const row_block *b, int first, float *to, const int kind) {
    widen_chunk(b, b->a->keys, first, to, kind);
}
#else
/* Keys from rank `first` on as columns of floats, [dim, CHUNK_KEYS], the last key in place of those that are missing; codes
 * without their scales. */
INLINE void convert_keys(const row_block *b, int first, float *to, const int kind) {
    const int dim = b->a->head_dim;
    const long stride = slot_stride(kind, b->a->kv_heads, dim), head = (long)b->kv_head * dim;
    for (int key = 0; key < CHUNK_KEYS; key += LANES) {
        long at[LANES];
        for (int i = 0; i < LANES; i++) {
            int rank = first + key + i < b->hi ? first + key + i : b->hi - 1;
            at[i] = b->slots[rank - b->lo] * stride + head;
        }
        for (int d = 0; d < dim; d += LANES) {
            vf x[LANES];
            _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) x[i] = load_kv(b->a->keys, at[i] + d, kind);
            transpose_lanes(x);
            _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) store(to + (d + i) * CHUNK_KEYS + key, x[i]);
        }
    }
}

/* Scores of G query heads and the keys of a chunk, whose columns are `keys`. As the lanes in `score_keys`, every LANES-th
 * number is added up, and then these sums in the order of `reduce_sum`. */
INLINE void score_columns(const float *q, const float *keys, int dim, float (*to)[CHUNK_KEYS], const int G) {
    for (int key = 0; key < CHUNK_KEYS; key += LANES) {
        vf total[HEAD_BLOCK];
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) total[g] = (vf){0};
        _Pragma("GCC unroll 4") for (int lane = 0; lane < LANES; lane += 2) {
            vf even[HEAD_BLOCK], odd[HEAD_BLOCK];
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) even[g] = odd[g] = (vf){0};
            for (int d = lane; d < dim; d += LANES) {
                vf k = load(keys + d * CHUNK_KEYS + key), next = load(keys + (d + 1) * CHUNK_KEYS + key);
                _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
                    even[g] = multiply_add(k, broadcast(q[g * dim + d]), even[g]);
                    odd[g] = multiply_add(next, broadcast(q[g * dim + d + 1]), odd[g]);
                }
            }
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) total[g] = (total[g] + even[g]) + odd[g];
        }
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) store(to[g] + key, total[g]);
    }
}

/* Scores of a row and the keys of a chunk that begins with rank `first`. */
static void score_chunk(const row_block *b, int row, const float *keys, int first, row_part seen) {
    const float *q = b->a->query + find_row(b, row);
    float score[HEAD_BLOCK][CHUNK_KEYS];
    switch (b->heads) {
    case 1: score_columns(q, keys, b->a->head_dim, score, 1); break;
    case 2: score_columns(q, keys, b->a->head_dim, score, 2); break;
    case 3: score_columns(q, keys, b->a->head_dim, score, 3); break;
    default: score_columns(q, keys, b->a->head_dim, score, 4);
    }
    for (int h = 0; h < b->heads; h++)
        memcpy(find_scores(b, row, h) + seen.from - b->parts[row].from, score[h] + seen.from - first,
               4ul * (unsigned)(seen.to - seen.from));
}
#endif

INLINE void score_own_part_rows(const row_block *b, int row, const int kind) {
    const fd_attention *a = b->a;
    const float *q = a->query + find_row(b, row);
    const int dim = a->head_dim, own = find_own_slots(b, row, b->parts[row].shared);
    const long stride = slot_stride(kind, a->kv_heads, dim), head = (long)b->kv_head * dim;
    for (int i = 0; i < own; i += KEY_BLOCK) {
        float *to = find_scores(b, row, 0) + b->parts[row].shared - b->parts[row].from + i;
        const int count = own - i;
        SCORE_ALL(a->keys, b->own_slots + i, stride, head, kind)
    }
}

INLINE void score_rows(const row_block *b, float *chunk, const int kind) {
    for (int first = b->lo, last; first < b->hi; first = last) {
        last = first + CHUNK_KEYS < b->hi ? first + CHUNK_KEYS : b->hi;
        convert_keys(b, first, chunk, kind);
        for (int r = 0; r < b->num_rows; r++) {
            row_part seen = cut_part(b->parts[r], first, last);
            prefetch_share(b, b->a->keys, last, r, kind);
            if (seen.from < seen.to) score_chunk(b, r, chunk, first, seen);
        }
    }
    for (int r = 0; r < b->num_rows; r++) score_own_part_rows(b, r, kind);
}

#define SUM_ROW(G, POOL, SLOTS, STRIDE, HEAD, KIND)                                                                    \
    case G:                                                                                                            \
        if (dim - d >= VALUE_BLOCK)                                                                                    \
            add_up_values(weight, b->ranks, POOL, SLOTS, count, STRIDE, (HEAD) + d, KIND, out + d, dim, 0, G,          \
                          VALUE_BLOCK / LANES);                                                                        \
        else                                                                                                           \
            add_up_values(weight, b->ranks, POOL, SLOTS, count, STRIDE, (HEAD) + d, KIND, out + d, dim, 0, G,          \
                          16 / LANES);                                                                                 \
        break;
#define SUM_ALL(...)                                                                                                   \
    for (int d = 0; d < dim; d += dim - d >= VALUE_BLOCK ? VALUE_BLOCK : 16) {                                         \
        switch (b->heads) {                                                                                            \
            SUM_ROW(1, __VA_ARGS__) SUM_ROW(2, __VA_ARGS__) SUM_ROW(3, __VA_ARGS__) SUM_ROW(4, __VA_ARGS__)            \
        }                                                                                                              \
    }

static void sum_chunk(const row_block *b, int row, const float *chunk, int first, int count, const float *weight) {
    float *out = b->a->out + find_row(b, row);
    const int dim = b->a->head_dim;
    SUM_ALL(chunk, PLACES + first, dim, 0, FD_KV_F32)
}

INLINE void sum_own_part(const row_block *b, int row, const int kind) {
    const fd_attention *a = b->a;
    float *out = a->out + find_row(b, row);
    const int dim = a->head_dim, count = find_own_slots(b, row, b->parts[row].shared);
    const long stride = slot_stride(kind, a->kv_heads, dim), head = (long)b->kv_head * dim;
    const float *weight = find_scores(b, row, 0) + b->parts[row].shared - b->parts[row].from;
    if (count) SUM_ALL(a->values, b->own_slots, stride, head, kind)
}

INLINE void sum_rows(const row_block *b, float *chunk, const int kind) {
    const fd_attention *a = b->a;
    for (int r = 0; r < b->num_rows; r++) memset(a->out + find_row(b, r), 0, 4ul * b->heads * a->head_dim);
    for (int first = b->lo, last; first < b->hi; first = last) {
        last = widen_chunk(b, a->values, first, chunk, kind);
        for (int r = 0; r < b->num_rows; r++) {
            row_part seen = cut_part(b->parts[r], first, last);
            prefetch_share(b, a->values, last, r, kind);
            if (seen.from < seen.to)
                sum_chunk(b, r, chunk, seen.from - first, seen.to - seen.from,
                          find_scores(b, r, 0) + seen.from - b->parts[r].from);
        }
    }
    for (int r = 0; r < b->num_rows; r++) sum_own_part(b, r, kind);
}

#endif
