/* Attention of several rows by products of bf16 pairs. 16 keys, or 32 values, meet the queries of all rows of a block while
 * they are in the first cache, in an order of their numbers that leaves nothing to be shuffled per query. Every row has the
 * sums of `attend_bf16` in the same order, and so the same bits. */
#ifndef FD_ATTENTION_PAIRS_H
#define FD_ATTENTION_PAIRS_H

#include "attention_vectors.h"

#ifdef __AVX512BF16__

enum {
    PAIR_VALUES = 32, /* values of a chunk */
    QUERY_BLOCK = 4,  /* queries that share a read of the keys: 4 x 4 sums stay in registers */
};

/* Four numbers each of rows i, i + 4, i + 8 and i + 12. */
INLINE __m512 load_fours(const float *a, const float *b, const float *c, const float *d) {
    __m512 x = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(x, _mm_loadu_ps(c), 2), _mm_loadu_ps(d), 3);
}

/* Four columns of 16 rows, loaded as above for i from 0 to 3, as four rows. */
INLINE void transpose_fours(const __m512 *x, float *to, long to_stride) {
    __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), b = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
    __m512d c = (__m512d)_mm512_unpacklo_ps(x[2], x[3]), d = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    _mm512_storeu_ps(to, (__m512)_mm512_unpacklo_pd(a, c));
    _mm512_storeu_ps(to + to_stride, (__m512)_mm512_unpackhi_pd(a, c));
    _mm512_storeu_ps(to + 2 * to_stride, (__m512)_mm512_unpacklo_pd(b, d));
    _mm512_storeu_ps(to + 3 * to_stride, (__m512)_mm512_unpackhi_pd(b, d));
}

/* One head of a pool of bf16 or int8 keys or values. */
typedef struct {
    const void *numbers;
    long stride, head; /* numbers of a slot; the head's first one in a slot */
    int dim, kind;
} pair_pool;

INLINE pair_pool view_pool(const fd_attention *a, const void *pool, int kv_head) {
    return (pair_pool){pool, slot_stride(a->kv_kind, a->kv_heads, a->head_dim), (long)kv_head * a->head_dim, a->head_dim,
                       a->kv_kind};
}

INLINE long find_pair_head(pair_pool p, int32_t slot) { return slot * p.stride + p.head; }
INLINE void prefetch_pairs(pair_pool p, int32_t slot) {
    prefetch_head(p.numbers, find_pair_head(p, slot), p.dim, p.kind);
}

/* The first 16 of `count` keys, [word][key], the last key in place of those that are missing. */
static void transpose_keys(pair_pool p, const int32_t *slots, int count, uint32_t *to) {
    const float *key[LANES];
    uint16_t widened[p.kind == FD_KV_INT8 ? LANES * p.dim : 1] __attribute__((aligned(64)));
    for (int i = 0; i < LANES; i++) {
        long at = find_pair_head(p, slots[i < count ? i : count - 1]);
        if (i + KEYS_AHEAD < count) prefetch_pairs(p, slots[i + KEYS_AHEAD]);
        key[i] = (const float *)(p.kind == FD_KV_BF16 ? (const uint16_t *)p.numbers + at : widened + i * p.dim);
        for (int d = 0; p.kind == FD_KV_INT8 && d < p.dim; d += 2 * LANES)
            _mm512_storeu_si512(widened + i * p.dim + d, load_pairs(p.numbers, at + d, FD_KV_INT8));
    }
    for (int w = 0; w < p.dim / 2; w += 4) {
        __m512 x[4];
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
            x[i] = load_fours(key[i] + w, key[i + 4] + w, key[i + 8] + w, key[i + 12] + w);
        transpose_fours(x, (float *)to + w * LANES, LANES);
    }
}

/* Scores of N queries, [N][words], and 16 keys. As the lanes in `score_keys_bf16`, every 16th word is added up, and then these
 * 16 sums in the order of `reduce_sum_16`. */
INLINE void score_queries(const uint32_t *q, const uint32_t *keys, int words, vf *score, const int N) {
    vf half[2][QUERY_BLOCK];
    _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) {
        vf sum[QUERY_BLOCK][4];
        _Pragma("GCC unroll 4") for (int n = 0; n < N; n++) {
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sum[n][i] = (vf){0};
        }
        for (int w = 4 * part; w < words; w += LANES) {
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                vu key = load_words(keys + (w + i) * LANES);
                _Pragma("GCC unroll 4") for (int n = 0; n < N; n++)
                    sum[n][i] = dot_bf16(sum[n][i], key, broadcast_words(q[n * words + w + i]));
            }
        }
        _Pragma("GCC unroll 4") for (int n = 0; n < N; n++) {
            vf total = (sum[n][0] + sum[n][2]) + (sum[n][1] + sum[n][3]);
            half[part / 2][n] = part % 2 ? half[part / 2][n] + total : total;
        }
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < N; n++) score[n] = half[0][n] + half[1][n];
}

/* Scores of up to QUERY_BLOCK queries. */
static void score_query_block(const uint32_t *q, const uint32_t *keys, int words, int count, vf *score) {
    switch (count) {
    case 1: score_queries(q, keys, words, score, 1); break;
    case 2: score_queries(q, keys, words, score, 2); break;
    case 3: score_queries(q, keys, words, score, 3); break;
    default: score_queries(q, keys, words, score, 4);
    }
}

/* Writes the scores `from` to `to` of 16; `at` is the place of the first of them. */
INLINE void store_scores(vf score, int from, int to, float *at) {
    int lo = from > 0 ? from : 0, hi = to < LANES ? to : LANES;
    if (lo < hi) _mm512_mask_storeu_ps(at, (__mmask16)((1u << hi) - (1u << lo)), (__m512)score);
}

/* The first PAIR_VALUES of `count` values two by two, [pair][column], in the processor's interleaving order of columns. A last
 * value without another one is in both places. */
static void interleave_values(pair_pool p, const int32_t *slots, int count, uint32_t *to) {
    for (int r = 0; r < count && r < PAIR_VALUES; r += 2, to += p.dim) {
        if (r + KEYS_AHEAD < count) prefetch_pairs(p, slots[r + KEYS_AHEAD]);
        if (r + 1 + KEYS_AHEAD < count) prefetch_pairs(p, slots[r + 1 + KEYS_AHEAD]);
        long a = find_pair_head(p, slots[r]), b = find_pair_head(p, slots[r + 1 < count ? r + 1 : r]);
        for (int d = 0; d < p.dim; d += 2 * LANES) {
            __m512i x = load_pairs(p.numbers, a + d, p.kind), y = load_pairs(p.numbers, b + d, p.kind);
            _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(x, y));
            _mm512_storeu_si512(to + d + LANES, _mm512_unpackhi_epi16(x, y));
        }
    }
}

/* Adds `count` pairs of weighted values to `out`, for G heads and V vectors of columns. */
INLINE void add_up_pairs(const uint32_t *weight, long weight_stride, const uint32_t *pairs, int count, int dim, float *out,
                         const int G, const int V) {
    vf sum[4 * 4];
    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
        _Pragma("GCC unroll 4") for (int j = 0; j < V; j++) sum[g * V + j] = load(out + g * dim + j * LANES);
    }
    for (int r = 0; r < count; r++, pairs += dim) {
        vu value[4];
        _Pragma("GCC unroll 4") for (int j = 0; j < V; j++) value[j] = load_words(pairs + j * LANES);
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
            vu w = broadcast_words(weight[g * weight_stride + r]);
            _Pragma("GCC unroll 4") for (int j = 0; j < V; j++) sum[g * V + j] = dot_bf16(sum[g * V + j], value[j], w);
        }
    }
    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
        _Pragma("GCC unroll 4") for (int j = 0; j < V; j++) store(out + g * dim + j * LANES, sum[g * V + j]);
    }
}

/* The same for up to 4 heads and all columns. */
static void add_up_chunk(const uint32_t *weight, long weight_stride, const uint32_t *pairs, int count, int dim, float *out,
                         int heads) {
    for (int d = 0; d < dim; d += dim - d >= 4 * LANES ? 4 * LANES : 2 * LANES) {
        switch (dim - d >= 4 * LANES ? heads : -heads) {
#define CASE(G)                                                                                                        \
    case G: add_up_pairs(weight, weight_stride, pairs + d, count, dim, out + d, G, 4); break;                          \
    case -G: add_up_pairs(weight, weight_stride, pairs + d, count, dim, out + d, G, 2); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
    }
}

/* Puts `count` sums from the interleaving order into that of the columns. */
static void order_all_columns(float *out, int count) {
    for (int i = 0; i < count; i += 2 * LANES) {
        vf low = load(out + i), high = load(out + i + LANES);
        order_columns(out + i, &low, &high);
    }
}

#endif
#endif
