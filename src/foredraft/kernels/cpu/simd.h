/* Vectors of one register with the compiler's vector extensions; intrinsics only for operations without one. */
#ifndef FD_SIMD_H
#define FD_SIMD_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ACCUMULATORS 24
#elif defined(__AVX2__)
#define LANES 8
#define ACCUMULATORS 12
#elif defined(__aarch64__)
#define LANES 4
#define ACCUMULATORS 24 /* of 32 registers */
#else
#define LANES 4
#define ACCUMULATORS 12
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(FD_AMX_EMULATED)
#define HAS_BF16_PRODUCTS 1
#else
#define HAS_BF16_PRODUCTS 0
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE long max_long(long a, long b) { return a > b ? a : b; }

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float vf_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh_at __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vf load(const float *p) { return *(const vf_at *)p; }
INLINE void store(float *p, vf x) { *(vf_at *)p = x; }
/* Past the caches, to a multiple of the register's size; `finish_streams` before other threads read it. */
INLINE void stream(float *p, vf x) {
#if LANES == 16
    _mm512_stream_ps(p, (__m512)x);
#elif LANES == 8
    _mm256_stream_ps(p, (__m256)x);
#else
    store(p, x);
#endif
}
INLINE void finish_streams(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
INLINE vu load_words(const uint32_t *p) { return *(const vu_at *)p; }
INLINE vf broadcast(float x) { return x - (vf){0}; }
INLINE vu broadcast_words(uint32_t x) { return x - (vu){0}; }
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* a > b ? a : b and a < b ? a : b, so NaN in b gives NaN. */
#if LANES == 16
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif LANES == 8
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return vselect(a < b, a, b); }
#endif

/* a * b + c, rounded once if the instruction set can. Compilers differ in which sums they fuse on their own, even
 * between copies of one loop, so -ffp-contract=off forbids it. Every fused operation is written as a call of these. */
INLINE vf multiply_add(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float multiply_add_scalar(float a, float b, float c) {
#if LANES > 4 || defined(__ARM_NEON)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE float reduce_sum(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE float reduce_max(vf x) {
    float max = x[0];
    for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
    return max;
}

INLINE float bf16_to_float(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* gcc converts halves of the register and joins them, where the processor has one instruction. */
INLINE vf load_bf16(const uint16_t *p) {
#if LANES == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif LANES == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_at *)p, vu) << 16);
#endif
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE vh to_bf16(vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vi nan = x != x;
    rounded = ((vu)nan & 0x7fc0) | (~(vu)nan & rounded);
    return __builtin_convertvector(rounded, vh);
}
INLINE void store_bf16(uint16_t *p, vf x) { *(vh_at *)p = to_bf16(x); }

INLINE uint16_t float_to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE void convert_to_bf16(const float *x, int n, uint16_t *out) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store_bf16(out + i, load(x + i));
    for (; i < n; i++) out[i] = float_to_bf16(x[i]);
}

/* Inputs of products with bf16 weights: bf16, or the same values as floats where the products are those of floats. */
#if HAS_BF16_PRODUCTS
typedef uint16_t rounded;
INLINE void store_rounded(rounded *p, vf x) { store_bf16(p, x); }
INLINE rounded round_float(float x) { return float_to_bf16(x); }
#else
typedef float rounded;
INLINE void store_rounded(rounded *p, vf x) { store(p, (vf)(__builtin_convertvector(to_bf16(x), vu) << 16)); }
INLINE rounded round_float(float x) { return bf16_to_float(float_to_bf16(x)); }
#endif
INLINE void round_row(const float *x, int n, rounded *out) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store_rounded(out + i, load(x + i));
    for (; i < n; i++) out[i] = round_float(x[i]);
}

/* acc + w.low * x.low + w.high * x.high, w and x pairs of bf16. */
INLINE vf dot_bf16(vf acc, vu w, vu x) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)x);
#else
    acc = multiply_add((vf)(w << 16), (vf)(x << 16), acc);
    return multiply_add((vf)(w & 0xffff0000u), (vf)(x & 0xffff0000u), acc);
#endif
}

/* e^x to about 1 ulp, by 2^n * e^r with |r| <= ln2 / 2. */
INLINE vf vexp(vf x) {
    x = vmin(broadcast(88.7f), vmax(broadcast(-87.3f), x));
    vf shifted = multiply_add(x, broadcast(1.44269504f), broadcast(12582912.0f)); /* 1.5 * 2^23: rounds to an integer */
    vf n = shifted - 12582912.0f;
    vf r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    vf y = broadcast(1.9875691500e-4f);
    y = multiply_add(y, r, broadcast(1.3981999507e-3f));
    y = multiply_add(y, r, broadcast(8.3334519073e-3f));
    y = multiply_add(y, r, broadcast(4.1665795894e-2f));
    y = multiply_add(y, r, broadcast(1.6666665459e-1f));
    y = multiply_add(y, r, broadcast(5.0000001201e-1f));
    y = multiply_add(y * r, r, r) + 1.0f;
#if LANES == 16
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)n);
#endif
    return y * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vf vtanh(vf x) { return 2.0f * vsigmoid(2.0f * x) - 1.0f; }

#endif
