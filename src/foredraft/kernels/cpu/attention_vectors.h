/* Attention of one row and one key head by vectors. */
#ifndef FD_ATTENTION_VECTORS_H
#define FD_ATTENTION_VECTORS_H

#include "attention_row.h"

#define KEY_BLOCK 16    /* keys scored at a time */
#define HEAD_BLOCK 4    /* query heads that share one read of a key */
#define VALUE_BLOCK 64  /* columns of the values summed at a time */

/* [16] sums of the lanes of 16 vectors. */
INLINE void reduce_sum_16(vf *v, float *to) {
#if LANES == 16
    __m512 *x = (__m512 *)v;
    for (int i = 0; i < 16; i += 2) { /* halves of each 128 bits: pairs of keys adjacent */
        __m512 a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
        x[i / 2] = _mm512_add_ps(a, b);
    }
    for (int i = 0; i < 8; i += 2) {
        __m512 a = (__m512)_mm512_unpacklo_pd((__m512d)x[i], (__m512d)x[i + 1]);
        __m512 b = (__m512)_mm512_unpackhi_pd((__m512d)x[i], (__m512d)x[i + 1]);
        x[i / 2] = _mm512_add_ps(a, b);
    }
    for (int i = 0; i < 4; i += 2)
        x[i / 2] =
            _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 1], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 1], 0xdd));
    __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    _mm512_storeu_ps(to, y);
#else
    for (int i = 0; i < KEY_BLOCK; i++) to[i] = reduce_sum(v[i]);
#endif
}

/* Scores of KEY_BLOCK keys for G query heads. */
INLINE void score_keys(const float *q, const void *keys, const int32_t *slots, int count, long stride, long head,
                       int dim, const int kind, float *to, long to_stride, const int G) {
    vf part[HEAD_BLOCK][KEY_BLOCK];
    for (int i = 0; i < KEY_BLOCK; i++) {
        long at = slots[i < count ? i : count - 1] * stride + head;
        if (i + KEYS_AHEAD < count) prefetch_head(keys, slots[i + KEYS_AHEAD] * stride + head, dim, kind);
        vf acc[HEAD_BLOCK];
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) acc[g] = (vf){0};
        for (int d = 0; d < dim; d += LANES) {
            vf k = load_kv(keys, at + d, kind);
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) acc[g] = multiply_add(k, load(q + g * dim + d), acc[g]);
        }
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) part[g][i] = acc[g];
    }
    for (int g = 0; g < G; g++) reduce_sum_16(part[g], to + g * to_stride);
}

/* Adds the weighted values to `to`, for G query heads and V vectors of columns. */
INLINE void add_up_values(const float *weight, long weight_stride, const void *values, const int32_t *slots, int count,
                          long stride, long head, const int kind, float *to, int dim, const int prefetches,
                          const int G, const int V) {
    vf acc[HEAD_BLOCK * VALUE_BLOCK / LANES];
    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
        _Pragma("GCC unroll 16") for (int j = 0; j < V; j++) acc[g * V + j] = load(to + g * dim + j * LANES);
    }
    for (int r = 0; r < count; r++) {
        long at = slots[r] * stride + head;
        if (prefetches && r + KEYS_AHEAD < count)
            prefetch_head(values, slots[r + KEYS_AHEAD] * stride + head, V * LANES, kind);
        _Pragma("GCC unroll 16") for (int j = 0; j < V; j++) {
            vf v = load_kv(values, at + j * LANES, kind);
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++)
                acc[g * V + j] = multiply_add(v, broadcast(weight[g * weight_stride + r]), acc[g * V + j]);
        }
    }
    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
        _Pragma("GCC unroll 16") for (int j = 0; j < V; j++) store(to + g * dim + j * LANES, acc[g * V + j]);
    }
}

/* Weighted sum of the values, for G query heads and V vectors of columns. */
INLINE void sum_values(const float *weight, long weight_stride, const void *values, const int32_t *slots, int count,
                       long stride, long head, const int kind, float *to, int dim, const int G, const int V) {
    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
        _Pragma("GCC unroll 16") for (int j = 0; j < V; j++) store(to + g * dim + j * LANES, (vf){0});
    }
    add_up_values(weight, weight_stride, values, slots, count, stride, head, kind, to, dim, 1, G, V);
}

#define SCORE(G)                                                                                                       \
    case G:                                                                                                            \
        score_keys(q, a->keys, slots + i, count - i, stride, head, dim, kind, weight + g * ranks + i, ranks, G);   \
        break;
#define SUM_VALUES(G)                                                                                                  \
    case G:                                                                                                            \
        if (dim - d >= VALUE_BLOCK)                                                                                    \
            sum_values(weight + g * ranks, ranks, a->values, slots, count, stride, head + d, kind, out + d, dim, G,\
                   VALUE_BLOCK / LANES);                                                                               \
        else                                                                                                           \
            sum_values(weight + g * ranks, ranks, a->values, slots, count, stride, head + d, kind, out + d, dim, G,\
                   16 / LANES);                                                                                        \
        break;

/* What one row sees of one key head: the slots of its keys, and the scores or weights of its query heads. */
typedef struct {
    int group, count;         /* query heads of the key head; keys seen */
    long stride, head, ranks; /* slot stride; offset of the head; count in whole blocks */
    int32_t *slots;           /* [count] */
    float *scales[2];         /* [count] of int8 keys and values */
    float *weight;            /* [group, ranks] */
} row_view;

INLINE row_view view_row(const fd_attention *a, const fd_rows *rows, int row, int kv_head, char *scratch) {
    int length = count_keys(rows, row);
    int from = first_key(a, row, length), count = length - from;
    long ranks = (count + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
    int32_t *slots = (int32_t *)scratch;
    float *numbers = (float *)(slots + ranks), *scales[2] = {numbers, numbers + ranks};
    find_slots(rows, row, from, length, slots);
    for (int i = 0; i < 2 && a->kv_kind == FD_KV_INT8; i++)
        gather_scales(a, i ? a->values : a->keys, slots, count, kv_head, scales[i]);
    return (row_view){.group = a->heads / a->kv_heads, .count = count,
                   .stride = slot_stride(a->kv_kind, a->kv_heads, a->head_dim),
                   .head = (long)kv_head * a->head_dim, .ranks = ranks, .slots = slots,
                   .scales = {scales[0], scales[1]}, .weight = numbers + 2 * ranks};
}

INLINE void attend_float(const fd_attention *a, const fd_rows *rows, int row, int kv_head, char *scratch,
                      const int kind) {
    const row_view v = view_row(a, rows, row, kv_head, scratch);
    const long stride = v.stride, head = v.head, ranks = v.ranks;
    const int dim = a->head_dim, count = v.count;
    const int32_t *slots = v.slots;
    float *weight = v.weight;
    for (int g = 0; g < v.group; g += HEAD_BLOCK) {
        int heads = v.group - g < HEAD_BLOCK ? v.group - g : HEAD_BLOCK;
        const float *q = a->query + ((long)row * a->heads + kv_head * v.group + g) * dim;
        float *out = a->out + ((long)row * a->heads + kv_head * v.group + g) * dim;
        for (int i = 0; i < count; i += KEY_BLOCK) {
            switch (heads) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) }
        }
        for (int h = 0; h < heads; h++) {
            float *s = weight + (g + h) * ranks;
            if (kind == FD_KV_INT8) scale_entries(s, v.scales[0], count);
            vf factor = broadcast(weigh_head(a, rows, row, kv_head * v.group + g + h, s, 0, count));
            if (kind == FD_KV_INT8) scale_entries(s, v.scales[1], count);
            for (int i = 0; i < count; i += LANES) store(s + i, load(s + i) * factor);
        }
        for (int d = 0; d < dim; d += dim - d >= VALUE_BLOCK ? VALUE_BLOCK : 16) {
            switch (heads) { SUM_VALUES(1) SUM_VALUES(2) SUM_VALUES(3) SUM_VALUES(4) }
        }
    }
}

#ifdef __AVX512BF16__
/* 32 numbers of a pool in bf16; codes are exact in it. */
INLINE __m512i load_pairs(const void *pool, long at, const int kind) {
    if (kind == FD_KV_BF16) return _mm512_loadu_si512((const uint16_t *)pool + at);
    const __m512i high_words = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                                25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const int8_t *codes = (const int8_t *)pool + at;
    __m512i low = (__m512i)load_codes(codes), high = (__m512i)load_codes(codes + 16);
    return _mm512_permutex2var_epi16(low, high_words, high);
}

/* Queries and weights are rounded to bf16 like keys and values, which halves the instructions. */
INLINE void score_keys_bf16(const uint16_t *q, const void *keys, const int32_t *slots, int count, long stride, long head,
                            int dim, const int kind, float *to, long to_stride, const int G) {
    vf part[HEAD_BLOCK][KEY_BLOCK];
    for (int i = 0; i < KEY_BLOCK; i++) {
        long at = slots[i < count ? i : count - 1] * stride + head;
        if (i + KEYS_AHEAD < count) prefetch_head(keys, slots[i + KEYS_AHEAD] * stride + head, dim, kind);
        vf acc[HEAD_BLOCK];
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) acc[g] = (vf){0};
        for (int d = 0; d < dim / 2; d += LANES) {
            vu words = (vu)load_pairs(keys, at + 2 * d, kind);
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++)
                acc[g] = dot_bf16(acc[g], words, load_words((const uint32_t *)(q + g * dim) + d));
        }
        _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) part[g][i] = acc[g];
    }
    for (int g = 0; g < G; g++) reduce_sum_16(part[g], to + g * to_stride);
}

/* Puts sums of 32 columns in the processor's interleaving order into that of the columns. */
INLINE void order_columns(float *to, vf *low_half, vf *high_half) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 low = (__m512)*low_half, high = (__m512)*high_half;
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(to + LANES, _mm512_permutex2var_ps(low, second, high));
}

/* Weighted sum of the values, two keys and V vectors of columns at a time, for G query heads. */
INLINE void sum_values_bf16(const uint16_t *weight, long weight_stride, const void *values, const int32_t *slots,
                            int count, long stride, long head, const int kind, float *to, int dim, const int G,
                            const int V) {
    vf acc[HEAD_BLOCK * 4];
    _Pragma("GCC unroll 16") for (int i = 0; i < G * V; i++) acc[i] = (vf){0};
    for (int r = 0; r < count; r += 2) {
        long a = slots[r] * stride + head, b = slots[r + 1 < count ? r + 1 : r] * stride + head;
        if (r + KEYS_AHEAD + 1 < count) {
            prefetch_head(values, slots[r + KEYS_AHEAD] * stride + head, V * LANES, kind);
            prefetch_head(values, slots[r + KEYS_AHEAD + 1] * stride + head, V * LANES, kind);
        }
        _Pragma("GCC unroll 4") for (int j = 0; j < V; j += 2) {
            __m512i x = load_pairs(values, a + j * LANES, kind), y = load_pairs(values, b + j * LANES, kind);
            vu low = (vu)_mm512_unpacklo_epi16(x, y), high = (vu)_mm512_unpackhi_epi16(x, y);
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
                vu w = broadcast_words(*(const uint32_t *)(weight + g * weight_stride + r));
                acc[g * V + j] = dot_bf16(acc[g * V + j], low, w);
                acc[g * V + j + 1] = dot_bf16(acc[g * V + j + 1], high, w);
            }
        }
    }
    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {
        _Pragma("GCC unroll 4") for (int j = 0; j < V; j += 2)
            order_columns(to + g * dim + j * LANES, &acc[g * V + j], &acc[g * V + j + 1]);
    }
}

/* In place: `count` weights, times a factor, as bf16 at the start of their floats; after an odd count a zero follows. Weights
 * below 2^-126 become zero. */
INLINE void convert_weights_to_bf16(float *s, int count, float factor) {
    uint16_t *to = (uint16_t *)s;
    int padded = (count + LANES - 1) / LANES * LANES;
    for (int i = 0; i < padded; i += LANES)
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh((__m512)(load(s + i) * factor)));
    if (count & 1) to[count] = 0;
}

#define SCORE_BF16(G)                                                                                                  \
    case G:                                                                                                            \
        score_keys_bf16(q, a->keys, slots + i, count - i, stride, head, dim, kind, weight + g * ranks + i, ranks, G);  \
        break;
#define SUM_VALUES_BF16(G)                                                                                             \
    case G:                                                                                                            \
        if (dim - d >= VALUE_BLOCK)                                                                                    \
            sum_values_bf16(rounded, 2 * ranks, a->values, slots, count, stride, head + d, kind, out + d, dim, G, 4);  \
        else                                                                                                           \
            sum_values_bf16(rounded, 2 * ranks, a->values, slots, count, stride, head + d, kind, out + d, dim, G, 2);  \
        break;

INLINE void attend_bf16(const fd_attention *a, const fd_rows *rows, int row, int kv_head, char *scratch, const int kind) {
    const row_view v = view_row(a, rows, row, kv_head, scratch);
    const long stride = v.stride, head = v.head, ranks = v.ranks;
    const int dim = a->head_dim, count = v.count;
    const int32_t *slots = v.slots;
    float *weight = v.weight;
    uint16_t q[HEAD_BLOCK * dim];
    for (int g = 0; g < v.group; g += HEAD_BLOCK) {
        int heads = v.group - g < HEAD_BLOCK ? v.group - g : HEAD_BLOCK;
        const float *wide = a->query + ((long)row * a->heads + kv_head * v.group + g) * dim;
        float *out = a->out + ((long)row * a->heads + kv_head * v.group + g) * dim;
        for (int i = 0; i < heads * dim; i += LANES) store_bf16(q + i, load(wide + i));
        for (int i = 0; i < count; i += KEY_BLOCK) {
            switch (heads) { SCORE_BF16(1) SCORE_BF16(2) SCORE_BF16(3) SCORE_BF16(4) }
        }
        for (int h = 0; h < heads; h++) {
            float *s = weight + (g + h) * ranks;
            if (kind == FD_KV_INT8) scale_entries(s, v.scales[0], count);
            float factor = weigh_head(a, rows, row, kv_head * v.group + g + h, s, 0, count);
            if (kind == FD_KV_INT8) scale_entries(s, v.scales[1], count);
            convert_weights_to_bf16(s, count, factor);
        }
        const uint16_t *rounded = (const uint16_t *)(weight + g * ranks);
        for (int d = 0; d < dim; d += dim - d >= VALUE_BLOCK ? VALUE_BLOCK : 32) {
            switch (heads) { SUM_VALUES_BF16(1) SUM_VALUES_BF16(2) SUM_VALUES_BF16(3) SUM_VALUES_BF16(4) }
        }
    }
}
#endif

/* Bytes of scratch memory for one row. */
INLINE long row_scratch(const fd_rows *rows, int group) {
    long ranks = (rows->max_keys + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
    return ranks * 4 * (3 + group);
}

/* Whether keys and values are read as floats. */
INLINE int is_by_floats(const fd_attention *a) {
#ifdef __AVX512BF16__
    return a->kv_kind == FD_KV_F32 || a->head_dim % 32 != 0;
#else
    return (void)a, 1;
#endif
}

static void attend_row(const fd_attention *a, const fd_rows *rows, int row, int kv_head, char *scratch) {
#ifdef __AVX512BF16__
    if (!is_by_floats(a)) {
        if (a->kv_kind == FD_KV_INT8) attend_bf16(a, rows, row, kv_head, scratch, FD_KV_INT8);
        else attend_bf16(a, rows, row, kv_head, scratch, FD_KV_BF16);
        return;
    }
#endif
    if (a->kv_kind == FD_KV_INT8) attend_float(a, rows, row, kv_head, scratch, FD_KV_INT8);
    else if (a->kv_kind == FD_KV_BF16) attend_float(a, rows, row, kv_head, scratch, FD_KV_BF16);
    else attend_float(a, rows, row, kv_head, scratch, FD_KV_F32);
}

#endif
