/* Weights of a block's queries from their scores, for attention_tiles.h. */
#ifndef FD_ATTENTION_WEIGHTS_H
#define FD_ATTENTION_WEIGHTS_H

#include "attention_block.h"

#if HAS_TILE_ATTENTION

/* Lanes of ranks that a row sees, of the 16 from `rank` on, of which it sees some. */
INLINE __mmask16 find_seen(row_range range, int rank) {
    unsigned seen = 0xffff;
    if (rank < range.from) seen = range.from - rank < 16 ? seen << (range.from - rank) : 0;
    if (rank + 16 > range.to) seen &= 0xffffu >> (rank + 16 - range.to);
    return (__mmask16)seen;
}

/* Weights of a query in bf16, in place of its exponentials; zero where its row sees nothing. Those of the own part move. */
static void store_weights(const query_block *b, int query, row_range range, float factor, const float *scales) {
    float *s = b->scores + query * b->stride;
    uint16_t *w = (uint16_t *)s;
    int start = range.from / KEY_TILE * KEY_TILE, end = round_up(range.to, 16);
    for (int i = start; i < end; i += 16) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s + i), _mm512_set1_ps(factor));
        if (scales) x = _mm512_mul_ps(x, _mm512_loadu_ps(scales + i));
        if (i < range.from || i + 16 > range.to) x = _mm512_maskz_mov_ps(find_seen(range, i), x);
        _mm256_storeu_si256((__m256i *)(w + i), round_to_bf16(x));
    }
    memset(w, 0, 2 * (size_t)start);
    memset(w + end, 0, 2 * (size_t)(b->padded - end));
    if (range.own >= range.to) return;
    memcpy(w + b->padded + range.own, w + range.own, 2 * (size_t)(b->padded - range.own));
    memset(w + range.own, 0, 2 * (size_t)(b->padded - range.own));
}

INLINE void multiply_scales(float *s, const float *scales, int count) {
    for (int i = 0; i < count; i += LANES) store(s + i, load(s + i) * load(scales + i));
}

/* 2^x to about 3e-6, which is far below the rounding of weights to bf16; zero in the lanes that are not given. x <= 0, or
 * a little above. */
INLINE __m512 exp2_of_lanes(__mmask16 lanes, __m512 x) {
    const __m512 shift = _mm512_set1_ps(12582912.0f); /* 1.5 * 2^23: rounds to an integer */
    x = _mm512_max_ps(_mm512_set1_ps(-125.0f), x);
    __m512 n = _mm512_sub_ps(_mm512_add_ps(x, shift), shift), f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(9.5701013e-3f), f, _mm512_set1_ps(5.5917860e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4024745e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9312181e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.9999926e-1f));
    return _mm512_maskz_scalef_ps(lanes, y, n);
}

/* `weigh_head` of scores that are only scaled, in fewer instructions. */
static float weigh_scaled_head(float scale, const float *sink, float *s, int first, int count) {
    const float by = scale * 1.44269504f; /* powers of two instead of e */
    __m512 max = _mm512_set1_ps(-3e38f), total = _mm512_setzero_ps();
    hide_edges(s, first, count);
    for (int i = 0; i < count; i += 16) max = _mm512_max_ps(max, _mm512_loadu_ps(s + i));
    float top = reduce_max((vf)max) * by, rest = 0;
    if (sink && *sink * 1.44269504f > top) top = *sink * 1.44269504f;
    for (int i = 0; i < count; i += 16) {
        __m512 x = _mm512_loadu_ps(s + i);
        __mmask16 is_shown = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-2e38f), _CMP_NLT_UQ); /* NaN is shown */
        x = exp2_of_lanes(is_shown, _mm512_fmsub_ps(x, _mm512_set1_ps(by), _mm512_set1_ps(top)));
        _mm512_storeu_ps(s + i, x);
        total = _mm512_add_ps(total, x);
    }
    if (sink) rest = ((vf)exp2_of_lanes(0xffff, _mm512_set1_ps(*sink * 1.44269504f - top)))[0];
    return 1.0f / (reduce_sum((vf)total) + rest);
}

INLINE float weigh_query(const query_block *b, int query, int row, row_range range, int start) {
    const fd_attention *a = b->a;
    float *s = b->scores + query * b->stride + start;
    int head = query_head(b, query), first = range.from - start, count = range.to - start;
    if (!a->bias && a->softcap <= 0 && a->scale > 0)
        return weigh_scaled_head(a->scale, a->sinks ? a->sinks + head : NULL, s, first, count);
    return weigh_head(a, b->rows, b->first_row + row, head, s, first, count);
}

/* Softmax of the scores of a row's queries, then their weights. */
static void weigh_row(const query_block *b, int row) {
    const fd_attention *a = b->a;
    row_range range = b->ranges[row];
    int start = range.from / KEY_TILE * KEY_TILE, is_int8 = a->kv_kind == FD_KV_INT8;
    const float *scales[2] = {b->scales[0], b->scales[1]};
    if (has_own_part(b, row)) fill_own_slots(b, row);
    for (int i = 0; is_int8 && has_own_part(b, row) && i < 2; i++) {
        float *own = b->own_scales + i * b->padded;
        memcpy(own, scales[i], 4 * (size_t)range.own);
        fill_scales(b, i ? a->values : a->keys, b->own_slots, range.own, round_up(range.to, 16), own);
        scales[i] = own;
    }
    for (int j = row * b->heads; j < (row + 1) * b->heads; j++) {
        if (is_int8) multiply_scales(b->scores + j * b->stride + start, scales[0] + start, range.to - start);
        store_weights(b, j, range, weigh_query(b, j, row, range, start), is_int8 ? scales[1] : NULL);
    }
}

static void weigh_block(const query_block *b) {
    for (int i = 0; b->a->kv_kind == FD_KV_INT8 && i < 2; i++)
        fill_scales(b, i ? b->a->values : b->a->keys, b->slots, b->lo / KEY_TILE * KEY_TILE, b->padded, b->scales[i]);
    for (int r = 0; r < b->num_rows; r++) weigh_row(b, r);
}

#endif
#endif
