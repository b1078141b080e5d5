/* Attention of a block of consecutive rows of one request by vectors. */
#ifndef FD_ATTENTION_ROWS_H
#define FD_ATTENTION_ROWS_H

#include "attention_floats.h"
#include "attention_pairs.h"

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

INLINE void attend_rows_by_floats(row_block *b, const int kind) {
    float chunk[CHUNK_KEYS * b->a->head_dim] __attribute__((aligned(64)));
    score_rows(b, chunk, kind);
    weigh_rows(b);
    sum_rows(b, chunk, kind);
}

#ifdef __AVX512BF16__
static void attend_rows_by_pairs(row_block *b) {
    uint32_t chunk[PAIR_VALUES * b->a->head_dim / 2] __attribute__((aligned(64)));
    score_rows_by_pairs(b, chunk);
    weigh_rows(b);
    sum_rows_by_pairs(b, chunk);
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
        if (a->kv_kind == FD_KV_INT8) attend_rows_by_floats(&b, FD_KV_INT8);
        else if (a->kv_kind == FD_KV_BF16) attend_rows_by_floats(&b, FD_KV_BF16);
        else attend_rows_by_floats(&b, FD_KV_F32);
    }
}

#endif
