/* Attention of consecutive rows of one request by vectors. Keys and values that several rows see are read once: a chunk
 * of them is converted to floats and meets all rows while it is in the first cache. Every row has the operations of
 * `attend_float` in the same order, and so the same bits. */
#ifndef FD_ATTENTION_ROWS_H
#define FD_ATTENTION_ROWS_H

#include "attention_pairs.h"
#include "attention_vectors.h"

enum {
    BLOCK_ROWS = 16,
    CHUNK_KEYS = 32,
    MAX_BLOCK_BYTES = 8 << 20, /* of a member's scores; with fewer rows in a block, more blocks read the keys again */
};

/* Ranks that a row sees: those before `shared` are those of the block's longest row, the rest is its own part. */
typedef struct {
    int from, shared, to;
} row_part;

typedef struct {
    const fd_attention *a;
    const fd_rows *rows;
    int first_row, num_rows, kv_head, first_head, heads; /* heads of every row, at most HEAD_BLOCK */
    int lo, hi;                                          /* ranks of the slots below */
    long ranks;                                          /* numbers from the scores of a head to those of the next */
    row_part parts[BLOCK_ROWS];
    int32_t *slots, *own_slots; /* [hi - lo] of the longest row; of a row's own part */
    float *scales[2];           /* [hi - lo] of int8 keys and values */
    float *scores;              /* [num_rows, heads, ranks], from the first key that the row sees */
} row_block;

/* Numbers of scores of one head of a row; the last vector of scores may begin at any rank. */
INLINE long score_ranks(long count) { return (count + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK + KEY_BLOCK; }

INLINE int limit_block_rows(const fd_rows *rows, int group) {
    long fitting = MAX_BLOCK_BYTES / (4 * score_ranks(rows->max_keys) * (group < HEAD_BLOCK ? group : HEAD_BLOCK));
    return fitting < 1 ? 1 : fitting > BLOCK_ROWS ? BLOCK_ROWS : (int)fitting;
}

/* Bytes of scratch memory for a block: slots, an own part's, two lists of scales, scores. */
INLINE long row_block_scratch(const fd_rows *rows, int group) {
    long heads = limit_block_rows(rows, group) * (group < HEAD_BLOCK ? group : HEAD_BLOCK);
    return 4 * score_ranks(rows->max_keys) * (4 + heads);
}

INLINE float *find_scores(const row_block *b, int row, int head) {
    return b->scores + (row * b->heads + head) * b->ranks;
}

/* Place of the first head of a row in `query` and `out`. */
INLINE long find_row(const row_block *b, int row) {
    const fd_attention *a = b->a;
    int head = b->kv_head * (a->heads / a->kv_heads) + b->first_head;
    return ((long)(b->first_row + row) * a->heads + head) * a->head_dim;
}

static void find_parts(row_block *b) {
    const fd_rows *rows = b->rows;
    int longest = find_longest(rows, b->first_row, b->num_rows), most = 0;
    b->hi = count_keys(rows, longest);
    b->lo = b->hi;
    for (int r = 0; r < b->num_rows; r++) {
        int row = b->first_row + r, to = count_keys(rows, row), from = first_key(b->a, row, to);
        int shared = rows->num_committed[row] + count_common(rows, row, longest) - from;
        b->parts[r] = (row_part){from, shared > 0 ? from + shared : from, to};
        if (from < b->lo) b->lo = from;
        if (to - from > most) most = to - from;
    }
    b->ranks = score_ranks(most);
    find_slots(rows, longest, b->lo, b->hi, b->slots);
}

/* Slots of the ranks that a row alone sees, from `from` on. Returns their number. */
static int find_own_slots(const row_block *b, int row, int from) {
    int to = b->parts[row].to;
    find_slots(b->rows, b->first_row + row, from, to, b->own_slots);
    return to - from;
}

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
#else
INLINE int score_common_width(const float *q, const float *keys, int count, int dim, float *to, long to_stride,
                              int heads) {
    return (void)q, (void)keys, (void)count, (void)dim, (void)to, (void)to_stride, (void)heads, 0;
}
#endif

/* Scores of a row and keys of a chunk from its key `first` on. */
static void score_chunk(const row_block *b, int row, const float *chunk, const int32_t *places, int first, int count,
                        float *to) {
    const float *q = b->a->query + find_row(b, row);
    const int dim = b->a->head_dim;
    for (int end = first + count; first < end; first += KEY_BLOCK, to += KEY_BLOCK) {
        count = end - first < KEY_BLOCK ? end - first : KEY_BLOCK;
        if (score_common_width(q, chunk + first * dim, count, dim, to, b->ranks, b->heads)) continue;
        SCORE_ALL(chunk, places + first, dim, 0, FD_KV_F32)
    }
}

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

/* Part of a row's shared ranks that lies in a chunk. */
INLINE row_part cut_part(row_part part, int first, int last) {
    if (part.from > first) first = part.from;
    if (part.shared < last) last = part.shared;
    return (row_part){first, last, last};
}

INLINE void score_rows(const row_block *b, const int32_t *places, float *chunk, const int kind) {
    for (int first = b->lo, last; first < b->hi; first = last) {
        last = widen_chunk(b, b->a->keys, first, chunk, kind);
        for (int r = 0; r < b->num_rows; r++) {
            row_part seen = cut_part(b->parts[r], first, last);
            prefetch_share(b, b->a->keys, last, r, kind);
            if (seen.from < seen.to)
                score_chunk(b, r, chunk, places, seen.from - first, seen.to - seen.from,
                            find_scores(b, r, 0) + seen.from - b->parts[r].from);
        }
    }
    for (int r = 0; r < b->num_rows; r++) score_own_part_rows(b, r, kind);
}

/* Multiplies the scores of a head by the scales of their keys or values in an int8 pool. */
static void scale_scores(const row_block *b, int row, const void *pool, const float *scales, float *s) {
    row_part part = b->parts[row];
    scale_entries(s, scales + part.from - b->lo, part.shared - part.from);
    apply_scales(b->a, pool, b->own_slots, part.to - part.shared, b->kv_head, s + part.shared - part.from);
}

/* Weights from exponentials, in the format in which values are added up. */
INLINE void store_row_weights(const fd_attention *a, float *s, int count, float factor) {
#ifdef __AVX512BF16__
    if (!is_by_floats(a)) {
        convert_weights_to_bf16(s, count, factor);
        return;
    }
#endif
    (void)a;
    for (int i = 0; i < count; i += LANES) store(s + i, load(s + i) * factor);
}

static void weigh_rows(const row_block *b) {
    const fd_attention *a = b->a;
    int is_coded = a->kv_kind == FD_KV_INT8;
    for (int r = 0; r < b->num_rows; r++) {
        int count = b->parts[r].to - b->parts[r].from;
        if (is_coded) find_own_slots(b, r, b->parts[r].shared);
        for (int h = 0; h < b->heads; h++) {
            float *s = find_scores(b, r, h);
            if (is_coded) scale_scores(b, r, a->keys, b->scales[0], s);
            int head = b->kv_head * (a->heads / a->kv_heads) + b->first_head + h;
            float factor = weigh_head(a, b->rows, b->first_row + r, head, s, 0, count);
            if (is_coded) scale_scores(b, r, a->values, b->scales[1], s);
            store_row_weights(a, s, count, factor);
        }
    }
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

static void sum_chunk(const row_block *b, int row, const float *chunk, const int32_t *places, int count,
                      const float *weight) {
    float *out = b->a->out + find_row(b, row);
    const int dim = b->a->head_dim;
    SUM_ALL(chunk, places, dim, 0, FD_KV_F32)
}

INLINE void sum_own_part(const row_block *b, int row, const int kind) {
    const fd_attention *a = b->a;
    float *out = a->out + find_row(b, row);
    const int dim = a->head_dim, count = find_own_slots(b, row, b->parts[row].shared);
    const long stride = slot_stride(kind, a->kv_heads, dim), head = (long)b->kv_head * dim;
    const float *weight = find_scores(b, row, 0) + b->parts[row].shared - b->parts[row].from;
    if (count) SUM_ALL(a->values, b->own_slots, stride, head, kind)
}

INLINE void sum_rows(const row_block *b, const int32_t *places, float *chunk, const int kind) {
    const fd_attention *a = b->a;
    for (int r = 0; r < b->num_rows; r++) memset(a->out + find_row(b, r), 0, 4ul * b->heads * a->head_dim);
    for (int first = b->lo, last; first < b->hi; first = last) {
        last = widen_chunk(b, a->values, first, chunk, kind);
        for (int r = 0; r < b->num_rows; r++) {
            row_part seen = cut_part(b->parts[r], first, last);
            prefetch_share(b, a->values, last, r, kind);
            if (seen.from < seen.to)
                sum_chunk(b, r, chunk, places + seen.from - first, seen.to - seen.from,
                          find_scores(b, r, 0) + seen.from - b->parts[r].from);
        }
    }
    for (int r = 0; r < b->num_rows; r++) sum_own_part(b, r, kind);
}

INLINE void attend_rows_of(row_block *b, const int kind) {
    float chunk[CHUNK_KEYS * b->a->head_dim] __attribute__((aligned(64)));
    int32_t places[CHUNK_KEYS + KEY_BLOCK]; /* of the rows of the chunk */
    for (int i = 0; i < CHUNK_KEYS + KEY_BLOCK; i++) places[i] = i;
    score_rows(b, places, chunk, kind);
    weigh_rows(b);
    sum_rows(b, places, chunk, kind);
}

#ifdef __AVX512BF16__
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

static void attend_rows_by_pairs(row_block *b) {
    const fd_attention *a = b->a;
    const pair_pool p = view_pool(a, a->values, b->kv_head);
    uint32_t chunk[PAIR_VALUES * a->head_dim / 2] __attribute__((aligned(64)));
    score_rows_by_pairs(b, chunk);
    weigh_rows(b);
    for (int r = 0; r < b->num_rows; r++) memset(a->out + find_row(b, r), 0, 4ul * b->heads * p.dim);
    for (int first = b->lo; first < b->hi; first += PAIR_VALUES) {
        sum_shared_pairs(b, p, first, chunk);
        sum_shared_pairs(b, p, first + 1, chunk); /* windows of an odd number of keys less */
    }
    for (int r = 0; r < b->num_rows; r++) sum_own_pairs(b, r, p, chunk);
}
#endif

/* Attention of `count` rows and one key head. */
static void attend_row_block(const fd_attention *a, const fd_rows *rows, int first, int count, int kv_head,
                             char *scratch) {
    const long most = score_ranks(rows->max_keys);
    const int group = a->heads / a->kv_heads;
    float *numbers = (float *)scratch;
    row_block b = {.a = a, .rows = rows, .first_row = first, .num_rows = count, .kv_head = kv_head,
                   .slots = (int32_t *)numbers, .own_slots = (int32_t *)(numbers + most),
                   .scales = {numbers + 2 * most, numbers + 3 * most}, .scores = numbers + 4 * most};
    find_parts(&b);
    for (int i = 0; i < 2 && a->kv_kind == FD_KV_INT8; i++)
        gather_scales(a, i ? a->values : a->keys, b.slots, b.hi - b.lo, kv_head, b.scales[i]);
    for (b.first_head = 0; b.first_head < group; b.first_head += HEAD_BLOCK) {
        b.heads = group - b.first_head < HEAD_BLOCK ? group - b.first_head : HEAD_BLOCK;
#ifdef __AVX512BF16__
        if (!is_by_floats(a)) {
            attend_rows_by_pairs(&b);
            continue;
        }
#endif
        if (a->kv_kind == FD_KV_INT8) attend_rows_of(&b, FD_KV_INT8);
        else if (a->kv_kind == FD_KV_BF16) attend_rows_of(&b, FD_KV_BF16);
        else attend_rows_of(&b, FD_KV_F32);
    }
}

#endif
