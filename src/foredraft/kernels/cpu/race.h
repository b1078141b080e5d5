/* The exponential race of sampling/rng.py: the token with the largest p / -log(u), u a function of key and token id.
 *
 * -log(u) >= 1 - u, so weight / (1 - u) is an upper bound of a score. A block of tokens is compared with the best score
 * so far by its largest weight and the leading bits of every u alone; few tokens need a logarithm. The scores of weights
 * and of probabilities differ by rounding only. If the two best scores are closer than `margin`, the race is left to the
 * reference. */
#ifndef FD_RACE_H
#define FD_RACE_H

#include "weights.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu
#define LEADING_BITS (~(((uint64_t)1 << 33) - 1)) /* bits that the last shift of the mix leaves */
#define SMALLEST_DISTANCE 0x1p-54                 /* below every 1 - u */

typedef uint64_t vq __attribute__((vector_size(LANES * 4)));
enum { WIDE_LANES = LANES / 2 }; /* lanes of vq */
enum { RACE_BLOCK = 128, WIDE_VECTORS = RACE_BLOCK / WIDE_LANES };

typedef struct {
    uint64_t key;
    double best, second, inverse_best, margin;
    int32_t token;
} race;

INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * MIX_1;
    x = (x ^ (x >> 27)) * MIX_2;
    return x ^ (x >> 31);
}

static void race_token(race *r, int32_t token, float w) {
    uint64_t bits = mix(r->key + (uint64_t)(token + 1) * GOLDEN) >> 12;
    double u = ((double)bits + 0.5) * 0x1p-52;
    if (!(w > r->second * (1 - u) * (1 - 1e-9))) return;
    double score = w / -log(u);
    if (score > r->best) {
        r->second = r->best;
        r->best = score;
        r->token = token;
        r->inverse_best = 1 / (score * (1 - r->margin)); /* a close runner-up must be seen too */
    } else if (score > r->second) r->second = score;
}

INLINE int is_certain(const race *r) { return r->second < r->best * (1 - r->margin); }

/* Returns the leading bits that u needs so that a token of weight w can reach the best score; 0 = every token can, and
 * -1 (all bits) = none can. */
INLINE uint64_t find_needed_bits(const race *r, float w) {
    double distance = w * r->inverse_best * (1 + 1e-9); /* largest 1 - u */
    if (!(distance < 1)) return 0;
    if (distance < SMALLEST_DISTANCE) return ~(uint64_t)0;
    double needed = (1 - distance) * 0x1p64;
    return needed >= 0x1p64 ? LEADING_BITS : (uint64_t)needed & LEADING_BITS;
}

INLINE vq mix_leading(vq x) {
    x = (x ^ (x >> 30)) * (vq)(MIX_1 - (vq){0});
    return (x ^ (x >> 27)) * (vq)(MIX_2 - (vq){0});
}

/* Bit mask of the lanes with x >= limit. */
INLINE uint32_t mask_at_least(vq x, uint64_t limit) {
#if LANES == 16
    return _mm512_cmpge_epu64_mask((__m512i)x, _mm512_set1_epi64((int64_t)limit));
#elif LANES == 8
    const uint64_t sign = (uint64_t)1 << 63;
    __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x((int64_t)(limit ^ sign)),
                                       _mm256_xor_si256((__m256i)x, _mm256_set1_epi64x((int64_t)sign)));
    return ~_mm256_movemask_pd((__m256d)below) & 15;
#else
    uint32_t mask = 0;
    for (int i = 0; i < WIDE_LANES; i++) mask |= (uint32_t)(x[i] >= limit) << i;
    return mask;
#endif
}

INLINE vq count_lanes(void) {
    vq lanes;
    for (int i = 0; i < WIDE_LANES; i++) lanes[i] = (uint64_t)i;
    return lanes;
}

/* Finds the tokens of a block that can reach the best score. ids NULL: the tokens first, first + 1, ... Returns whether
 * there is any; masks: [WIDE_VECTORS]. */
INLINE int find_candidates(const race *r, uint64_t needed, int32_t first, const int32_t *ids, uint8_t *masks) {
    uint32_t any = 0;
    vq state = (count_lanes() + (uint64_t)(first + 1)) * (vq)(GOLDEN - (vq){0}) + r->key;
    for (int v = 0; v < WIDE_VECTORS; v++) {
        if (ids) {
            typedef int32_t vi_half __attribute__((vector_size(LANES * 2)));
            vi_half part;
            memcpy(&part, ids + v * WIDE_LANES, sizeof part);
            state = (__builtin_convertvector(part, vq) + 1) * (vq)(GOLDEN - (vq){0}) + r->key;
        }
        uint32_t found = mask_at_least(mix_leading(state), needed);
        masks[v] = (uint8_t)found;
        any |= found;
        if (!ids) state += (uint64_t)WIDE_LANES * GOLDEN;
    }
    return any != 0;
}

#endif
