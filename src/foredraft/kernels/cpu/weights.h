/* Weights of tokens, with the same bits as sampling/weights.py computes by single operations of torch.
 *
 * The weight of a logit x is 2^((x - max) * scale) in float32; that of the likeliest token is 1. It is made of
 * multiplications and additions that are rounded one by one, never fused, so every instruction set has the same bits.
 * Sums are integers: a weight counts in units of 2^-42, rounded to the nearest. They are exact, so their order is free. */
#ifndef FD_WEIGHTS_H
#define FD_WEIGHTS_H

#include <math.h>

#include "simd.h"

#define MIN_EXPONENT (-100.0f) /* smaller weights are zero */
#define UNIT_BIAS 1536.0       /* 1.5 * 2^10: a double of this size has the precision of one unit, 2^-42 */
#define UNIT 0x1p-42
#define STEPS_BIAS 786432.0f /* 1.5 * 2^19: a float of this size has a precision of 1/16 */
#define POWER_1 0x1.62e43p-1f
#define POWER_2 0x1.ebff92p-3f
#define POWER_3 0x1.c6b348p-5f

/* 2^(j / 16) */
#define SIXTEENTHS                                                                                                     \
    0x1p+0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f, 0x1.3dea64p+0f, 0x1.4bfdaep+0f,            \
        0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f, 0x1.ae89fap+0f,                \
        0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f

static const float sixteenths[16] = {SIXTEENTHS};

/* Entry (index mod 16) of `sixteenths`. */
INLINE vf look_up_sixteenth(vi index) {
#if LANES == 16
    return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)(vf){SIXTEENTHS});
#elif LANES == 8
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(sixteenths), (__m256i)index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(sixteenths + 8), (__m256i)index);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28)); /* bit 3 as the sign */
#else
    vf found;
    for (int i = 0; i < LANES; i++) found[i] = sixteenths[index[i] & 15];
    return found;
#endif
}

/* 2^t for t <= 0, zero below MIN_EXPONENT. */
INLINE vf compute_power(vf t) {
    vi is_kept = t >= MIN_EXPONENT;
    t = (vf)(is_kept & (vi)t); /* -inf would give NaN */
    vf shifted = t + STEPS_BIAS;
    vf r = t - (shifted - STEPS_BIAS); /* exact */
    vf q = r * (POWER_1 + r * (POWER_2 + r * POWER_3));
    vi k = (vi)shifted - 0x49400000; /* t = k / 16 + r */
    vf e = look_up_sixteenth(k);
    vf y = e + e * q;
    return (vf)(((vi)y + ((k >> 4) << 23)) & is_kept);
}

INLINE float compute_power_scalar(float t) {
    if (!(t >= MIN_EXPONENT)) return 0;
    float shifted = t + STEPS_BIAS, r = t - (shifted - STEPS_BIAS);
    float q = r * (POWER_1 + r * (POWER_2 + r * POWER_3));
    int32_t k, bits;
    memcpy(&k, &shifted, 4);
    k -= 0x49400000;
    float y = sixteenths[k & 15] + sixteenths[k & 15] * q;
    memcpy(&bits, &y, 4);
    bits += (k >> 4) * (1 << 23);
    memcpy(&y, &bits, 4);
    return y;
}

INLINE int64_t count_units(double mass) {
    double shifted = mass + UNIT_BIAS, bias = UNIT_BIAS;
    int64_t units, zero;
    memcpy(&units, &shifted, 8);
    memcpy(&zero, &bias, 8);
    return units - zero;
}

/* Sum of the units of many vectors. A weight is split into a multiple of 2^-20 and a rest, both rounded by the addition
 * of a bias; their sums stay within 32 bits for MAX_PENDING vectors. */
#define HIGH_BIAS 12.0f        /* 1.5 * 2^3: precision 2^-20 */
#define LOW_BIAS 0x1.8p-19f    /* precision 2^-42 */
#define HIGH_BIAS_BITS 0x41400000u
#define LOW_BIAS_BITS 0x36400000u
enum { MAX_PENDING = 512 };

typedef struct {
    vu high, low;
    int64_t total;
    uint32_t pending;
} unit_sum;

INLINE void flush_units(unit_sum *sum) {
    vi high = (vi)(sum->high - sum->pending * HIGH_BIAS_BITS), low = (vi)(sum->low - sum->pending * LOW_BIAS_BITS);
    for (int i = 0; i < LANES; i++) sum->total += (int64_t)high[i] * (1 << 22) + low[i];
    *sum = (unit_sum){.total = sum->total};
}

INLINE void add_units(unit_sum *sum, vf w) {
    vf high = w + HIGH_BIAS;
    sum->high += (vu)high;
    sum->low += (vu)((w - (high - HIGH_BIAS)) + LOW_BIAS);
    if (++sum->pending == MAX_PENDING) flush_units(sum);
}

INLINE int64_t total_units(unit_sum *sum) {
    flush_units(sum);
    return sum->total;
}

/* Writes the kept lanes of a vector of values and one of ids behind each other, and returns the new number of entries.
 * Up to LANES entries beyond are overwritten. */
INLINE int append_kept(float *values, int32_t *ids, int count, vf value, vi id, vi keep) {
#if LANES == 16
    __mmask16 mask = _mm512_movepi32_mask((__m512i)keep);
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(mask, (__m512)value));
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(mask, (__m512i)id));
    return count + __builtin_popcount(mask);
#else
    for (int i = 0; i < LANES; i++) {
        values[count] = value[i];
        ids[count] = id[i];
        count -= keep[i];
    }
    return count;
#endif
}

INLINE int is_any(vi mask) {
#if LANES == 16
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

INLINE vi count_from(int32_t first) {
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes + first;
}

INLINE vi load_ints(const int32_t *p) { return (vi)load_words((const uint32_t *)p); }

/* log2(e) / temperature, so that the power is that of e. Temperatures outside float32's range are moved into it. */
INLINE float compute_scale(double temperature) {
    double scale = 1.4426950408889634 / temperature;
    return (float)(scale < 0x1p-126 ? 0x1p-126 : scale > 0x1.fffffep+127 ? 0x1.fffffep+127 : scale);
}

#endif
