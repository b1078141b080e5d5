/* Parts of paged attention that all its forms share: the keys that a row sees, and the softmax of their scores.
 *
 * A row sees keys by rank: the committed tokens through the page table, then its own path in the token tree. The order,
 * and so every bit of the result, equals that of decoding the same sequence one token at a time.
 */
#ifndef FD_ATTENTION_ROW_H
#define FD_ATTENTION_ROW_H

#include "foredraft.h"
#include "kv.h"
#include "simd.h"

INLINE int count_keys(const fd_rows *rows, int row) { return rows->num_committed[row] + rows->path_length[row]; }

/* Rank of the first key that a row with `count` keys sees. Its window ends at its own key. */
INLINE int first_key(const fd_attention *a, int row, int count) {
    int own = a->ahead ? count - a->ahead[row] : count;
    return a->sliding_window && own > a->sliding_window ? own - a->sliding_window : 0;
}

/* Slots of the keys from rank `from` to `to` of the row's sequence. */
INLINE void find_slots(const fd_rows *rows, int row, int from, int to, int32_t *slots) {
    const int32_t *pages = rows->pages + rows->page_offset[row], *path = rows->path_slots + rows->path_offset[row];
    int num_committed = rows->num_committed[row], size = rows->page_size, rank = from;
    while (rank < to && rank < num_committed) {
        int page = rank / size, end = (page + 1) * size;
        if (end > num_committed) end = num_committed;
        if (end > to) end = to;
        for (int slot = pages[page] * size + rank % size; rank < end;) slots[rank++ - from] = slot++;
    }
    for (; rank < to; rank++) slots[rank - from] = path[rank - num_committed];
}

/* Row with the most keys, of `count` rows. */
INLINE int find_longest(const fd_rows *rows, int first, int count) {
    int longest = first;
    for (int r = first; r < first + count; r++)
        if (count_keys(rows, r) >= count_keys(rows, longest)) longest = r;
    return longest;
}

/* Keys of the path of `row` that are also those of `other`. */
INLINE int count_common(const fd_rows *rows, int row, int other) {
    const int32_t *a = rows->path_slots + rows->path_offset[row], *b = rows->path_slots + rows->path_offset[other];
    int count = 0, length = rows->path_length[row];
    if (a == b) return length;
    while (count < length && a[count] == b[count]) count++;
    return count;
}

#define KEYS_AHEAD 48 /* keys, or values, that are prefetched before their use */

/* Consecutive keys are cache lines apart, and the processor does not predict the next address. The second cache waits for
 * more lines at a time than the first. */
INLINE void prefetch_head(const void *p, long at, int dim, const int kind) {
    const char *first = (const char *)p + at * number_bytes(kind);
    const int bytes = dim * number_bytes(kind);
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(first + i, 0, 2);
    if (kind == FD_KV_INT8) __builtin_prefetch(first + bytes - 1, 0, 2); /* slots are not a multiple of lines */
}

/* Adds the bias by distance to `count` scores; `ahead` keys follow the row's own. bias[0] is for all keys further back than
 * max_distance, bias[span] for the last entry's key and all after it. */
static void add_bias(float *s, int count, const float *bias, int max_distance, int ahead, int span) {
    int near = count - 1 - ahead - max_distance, last = near + span < count ? near + span : count;
    for (int i = 0; i < near && i < count; i++) s[i] += bias[0];
    for (int i = near > 0 ? near : 0; i < last; i++) s[i] += bias[i - near];
    for (int i = last > 0 ? last : 0; i < count; i++) s[i] += bias[span];
}

/* Replaces entries before `first` and from `count` on, so that their weights are zero. */
INLINE void hide_edges(float *s, int first, int count) {
    for (int i = 0; i < first; i++) s[i] = -3e38f;
    for (int i = count; i % LANES; i++) s[i] = -3e38f;
}

/* In place: e^(x - max) of the entries x; zero for hidden ones. Returns the factor that makes them weights: their sum's
 * inverse, with one more entry `sink`, which is not stored, or NULL. */
INLINE float exponentiate(float *s, int count, vf max, const float *sink) {
    vf top = broadcast(reduce_max(max)), total = {0};
    if (sink) top = vmax(top, broadcast(*sink));
    for (int i = 0; i < count; i += LANES) {
        vf x = load(s + i);
        vf e = vselect(x < -2e38f, (vf){0}, vexp(x - top));
        store(s + i, e);
        total += e;
    }
    float rest = sink ? vexp(broadcast(*sink) - top)[0] : 0;
    return 1.0f / (reduce_sum(total) + rest);
}

INLINE int bias_span(const fd_attention *a) { return a->query_rows ? 2 * a->max_distance : a->max_distance; }
INLINE int keys_ahead(const fd_attention *a, const fd_rows *rows, int row) { /* keys after the row's own */
    return a->query_rows ? count_keys(rows, row) - count_keys(a->query_rows, row) : 0;
}
INLINE const float *bias_row(const fd_attention *a, int head) {
    return a->bias ? a->bias + (long)head * (bias_span(a) + 1) : NULL;
}

/* In place: exponentials of the scores of a row's keys; entries before `first` are hidden. Returns the factor that makes
 * them weights. Entries up to a whole vector are written. */
static float weigh_head(const fd_attention *a, const fd_rows *rows, int row, int head, float *s, int first, int count) {
    const float *bias = bias_row(a, head), *sink = a->sinks ? a->sinks + head : NULL;
    vf max = broadcast(-3e38f);
    for (int i = 0; i < count; i += LANES) {
        vf x = load(s + i) * a->scale;
        if (a->softcap > 0) x = a->softcap * vtanh(x / a->softcap);
        store(s + i, x);
        if (!bias && i >= first && i + LANES <= count) max = vmax(max, x);
    }
    if (bias) add_bias(s, count, bias, a->max_distance, keys_ahead(a, rows, row), bias_span(a));
    hide_edges(s, first, count);
    int inner = first / LANES * LANES, last = count / LANES * LANES;
    if (!bias) { /* vectors at the edges were left out */
        if (inner < first) max = vmax(max, load(s + inner));
        if (last < count) max = vmax(max, load(s + last));
    }
    for (int i = 0; bias && i < count; i += LANES) max = vmax(max, load(s + i));
    return exponentiate(s, count, max, sink);
}

/* Multiplies an entry for every key by the key's scale in an int8 pool. */
INLINE void apply_scales(const fd_attention *a, const void *pool, const int32_t *slots, int count, int kv_head,
                         float *s) {
    for (int i = 0; i < count; i++) s[i] *= *head_scale(pool, slots[i], a->kv_heads, a->head_dim, kv_head);
}

/* The same with scales in a row. */
INLINE void scale_entries(float *s, const float *scales, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(s + i, load(s + i) * load(scales + i));
    for (; i < count; i++) s[i] *= scales[i];
}

INLINE void gather_scales(const fd_attention *a, const void *pool, const int32_t *slots, int count, int kv_head,
                          float *to) {
    for (int i = 0; i < count; i++) {
        if (i + KEYS_AHEAD < count)
            __builtin_prefetch(head_scale(pool, slots[i + KEYS_AHEAD], a->kv_heads, a->head_dim, kv_head), 0, 2);
        to[i] = *head_scale(pool, slots[i], a->kv_heads, a->head_dim, kv_head);
    }
}

#endif
