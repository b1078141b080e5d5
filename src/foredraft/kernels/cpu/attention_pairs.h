/* Attention of several rows by products of bf16 pairs. 16 keys, or 32 values, meet the queries of all rows of a block while
 * they are in the first cache, in an order of their numbers that leaves nothing to be shuffled per query. Every row has the
 * sums of `attend_bf16` in the same order, and so the same bits. */
#ifndef FD_ATTENTION_PAIRS_H
#define FD_ATTENTION_PAIRS_H

#include "row_block.h"
#include "transpose.h"

#ifdef __AVX512BF16__

enum {
    PAIR_VALUES = 32, /* values of a chunk */
    QUERY_BLOCK = 4,  /* queries that share a read of the keys: 4 x 4 sums stay in registers */
};

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
    long at[LANES];
    for (int i = 0; i < LANES; i++) {
        at[i] = find_pair_head(p, slots[i < count ? i : count - 1]);
        if (i + KEYS_AHEAD < count) prefetch_pairs(p, slots[i + KEYS_AHEAD]);
    }
    for (int d = 0; d < p.dim; d += 2 * LANES) {
        vf words[LANES];
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) words[i] = (vf)load_pairs(p.numbers, at[i] + d, p.kind);
        transpose_lanes(words);
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++, to += LANES) store((float *)to, words[i]);
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

/* Scores of all rows and the 16 keys from rank `first` on. */
static void score_pairs(const row_block *b, const uint32_t *q, const uint32_t *keys, int first) {
    const int words = b->a->head_dim / 2, queries = b->num_rows * b->heads;
    vf score[QUERY_BLOCK];
    for (int from = 0; from < queries; from += QUERY_BLOCK) {
        int n = queries - from < QUERY_BLOCK ? queries - from : QUERY_BLOCK;
        score_query_block(q + (long)from * words, keys, words, n, score);
        for (int i = 0; i < n; i++) {
            int row = (from + i) / b->heads;
            row_part part = b->parts[row];
            store_scores(score[i], part.from - first, part.shared - first,
                         find_scores(b, row, (from + i) % b->heads) + first - part.from);
        }
    }
}

static void score_own_pairs(const row_block *b, int row, pair_pool p, const uint32_t *q, uint32_t *keys) {
    const row_part part = b->parts[row];
    const int own = find_own_slots(b, row, part.shared);
    vf score[QUERY_BLOCK];
    for (int i = 0; i < own; i += LANES) {
        transpose_keys(p, b->own_slots + i, own - i, keys);
        score_query_block(q, keys, p.dim / 2, b->heads, score);
        for (int h = 0; h < b->heads; h++)
            store_scores(score[h], 0, own - i, find_scores(b, row, h) + part.shared - part.from + i);
    }
}

/* Scores of all rows. */
static void score_rows_by_pairs(const row_block *b, uint32_t *keys) {
    const fd_attention *a = b->a;
    const pair_pool p = view_pool(a, a->keys, b->kv_head);
    const int width = b->heads * a->head_dim;
    uint32_t q[b->num_rows * width / 2];
    for (int r = 0; r < b->num_rows; r++) convert_to_bf16(a->query + find_row(b, r), width, (uint16_t *)q + (long)r * width);
    for (int first = b->lo; first < b->hi; first += LANES) {
        transpose_keys(p, b->slots + first - b->lo, b->hi - first, keys);
        score_pairs(b, q, keys, first);
    }
    for (int r = 0; r < b->num_rows; r++) score_own_pairs(b, r, p, q + (long)r * width / 2, keys);
}

/* A row's part whose shared ranks are whole pairs, because the value after its last one is another row's. The longest row
 * has none after it. */
INLINE row_part find_pairs(const row_block *b, int row) {
    row_part part = b->parts[row];
    if (part.shared < b->hi) part.shared = part.from + (part.shared - part.from) / 2 * 2;
    return part;
}

/* Adds the values of the pairs from rank `first` to `to` of a row. */
INLINE void sum_pairs(const row_block *b, int row, const uint32_t *pairs, int first, int to) {
    const int from = b->parts[row].from;
    const uint32_t *weight = (const uint32_t *)find_scores(b, row, 0) + (first - from) / 2;
    add_up_chunk(weight, b->ranks, pairs, (to - first + 1) / 2, b->a->head_dim, b->a->out + find_row(b, row), b->heads);
}

/* Adds the values of a chunk from rank `first` on, for the rows whose pairs begin there. */
static void sum_shared_pairs(const row_block *b, pair_pool p, int first, uint32_t *pairs) {
    int is_read = 0;
    for (int r = 0; r < b->num_rows; r++) {
        row_part seen = cut_part(find_pairs(b, r), first, first + PAIR_VALUES);
        if ((first - b->parts[r].from) % 2 || seen.from >= seen.to) continue;
        if (!is_read) interleave_values(p, b->slots + first - b->lo, b->hi - first, pairs);
        is_read = 1;
        sum_pairs(b, r, pairs + (long)(seen.from - first) / 2 * p.dim, seen.from, seen.to);
    }
}

static void sum_own_pairs(const row_block *b, int row, pair_pool p, uint32_t *pairs) {
    const int from = find_pairs(b, row).shared, own = find_own_slots(b, row, from);
    for (int i = 0; i < own; i += PAIR_VALUES) {
        int count = own - i < PAIR_VALUES ? own - i : PAIR_VALUES;
        interleave_values(p, b->own_slots + i, own - i, pairs);
        sum_pairs(b, row, pairs, from + i, from + i + count);
    }
    order_all_columns(b->a->out + find_row(b, row), b->heads * p.dim);
}

/* Weighted sums of the values of all rows. */
static void sum_rows_by_pairs(const row_block *b, uint32_t *chunk) {
    const fd_attention *a = b->a;
    const pair_pool p = view_pool(a, a->values, b->kv_head);
    for (int r = 0; r < b->num_rows; r++) memset(a->out + find_row(b, r), 0, 4ul * b->heads * p.dim);
    for (int first = b->lo; first < b->hi; first += PAIR_VALUES) {
        sum_shared_pairs(b, p, first, chunk);
        sum_shared_pairs(b, p, first + 1, chunk); /* windows of an odd number of keys less */
    }
    for (int r = 0; r < b->num_rows; r++) sum_own_pairs(b, r, p, chunk);
}

#endif
#endif
