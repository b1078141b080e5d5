/* Keys and values in the pool. float32 and bf16: [slots, kv_heads, head_dim]. int8: a slot has codes [kv_heads, head_dim],
 * then float32 scales [kv_heads]; a code times its head's scale is the number.
 */
#ifndef FD_KV_H
#define FD_KV_H

#include "foredraft.h"
#include "simd.h"

#define MAX_CODE 127.0f
#define MIN_MAGNITUDE 1e-30f /* heads of smaller numbers are zero */

/* Numbers of a slot, or bytes of an int8 one. */
INLINE long slot_stride(int kind, int kv_heads, int head_dim) {
    return (long)kv_heads * (head_dim + (kind == FD_KV_INT8 ? 4 : 0));
}
INLINE int number_bytes(int kind) { return kind == FD_KV_F32 ? 4 : kind == FD_KV_BF16 ? 2 : 1; }

/* Scale of a head in an int8 pool. */
INLINE float *head_scale(const void *pool, long slot, int kv_heads, int head_dim, int head) {
    char *start = (char *)pool + slot * slot_stride(FD_KV_INT8, kv_heads, head_dim);
    return (float *)(start + (long)kv_heads * head_dim) + head;
}

typedef int8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vb_at __attribute__((vector_size(LANES), aligned(1)));

/* Compilers convert bytes with many instructions where the processor has one. */
INLINE vf load_codes(const int8_t *p) {
#if LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const vb_at *)p, vi), vf);
#endif
}

INLINE vf load_kv(const void *p, long i, const int kind) {
    if (kind == FD_KV_INT8) return load_codes((const int8_t *)p + i);
    return kind == FD_KV_BF16 ? load_bf16((const uint16_t *)p + i) : load((const float *)p + i);
}

/* Rounds to the nearest code. Numbers that are not finite make the scale NaN, so that they show in the logits. */
static void store_codes(const float *x, int n, int8_t *codes, float *scale) {
    vf max = {0}, rest = {0};
    for (int i = 0; i < n; i += LANES) {
        vf v = load(x + i);
        max = vmax(max, vmax(v, -v));
        rest += v * 0.0f;
    }
    float magnitude = reduce_max(max), inverse = magnitude > MIN_MAGNITUDE ? MAX_CODE / magnitude : 0;
    const vf bias = broadcast(12582912.0f); /* 1.5 * 2^23: a float of this size has the precision of one code */
    for (int i = 0; i < n; i += LANES) {
        vi rounded = (vi)(load(x + i) * inverse + bias) - (vi)bias;
        *(vb_at *)(codes + i) = __builtin_convertvector(rounded, vb);
    }
    *scale = magnitude / MAX_CODE + reduce_sum(rest);
}

/* Stores one head of a slot. */
static void store_head_kv(void *pool, int kind, long slot, int kv_heads, int head_dim, int head, const float *x) {
    long at = slot * slot_stride(kind, kv_heads, head_dim) + (long)head * head_dim;
    if (kind == FD_KV_INT8)
        store_codes(x, head_dim, (int8_t *)pool + at, head_scale(pool, slot, kv_heads, head_dim, head));
    else if (kind == FD_KV_BF16)
        for (int i = 0; i < head_dim; i += LANES) store_bf16((uint16_t *)pool + at + i, load(x + i));
    else
        memcpy((float *)pool + at, x, (size_t)head_dim * 4);
}

#endif
