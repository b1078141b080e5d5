/* Selection of the likeliest tokens by total mass or by number, without sorting: a radix search for the last one. */
#ifndef FD_SELECTION_H
#define FD_SELECTION_H

#include "weights.h"

enum { BUCKETS = 2048 };

/* The entries that are kept: keys above `key`, and those equal to it up to index `last`. */
typedef struct {
    uint32_t key;
    int32_t last;
} cut;

/* Key with the order of floats, NaN excluded. */
INLINE uint32_t order_key(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}

INLINE float key_to_float(uint32_t u) {
    float x;
    u ^= u >> 31 ? 0x80000000u : 0xffffffffu;
    memcpy(&x, &u, 4);
    return x;
}

INLINE int append_index(int32_t *ids, int count, vi id, vi keep) {
#if LANES == 16
    __mmask16 mask = _mm512_movepi32_mask((__m512i)keep);
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(mask, (__m512i)id));
    return count + __builtin_popcount(mask);
#else
    for (int i = 0; i < LANES; i++) {
        ids[count] = id[i];
        count -= keep[i];
    }
    return count;
#endif
}

INLINE int64_t count_mass(const float *w, int i) { return w ? count_units(w[i]) : 1; }

/* Finds the entries that come first by descending key and ascending index, until their masses reach `limit`, the
 * crossing entry included. w NULL: every entry has mass 1. The arrays are readable up to a whole vector.
 * members: [n + LANES] scratch. */
static cut find_cut(const uint32_t *key, const float *w, int n, int64_t limit, int32_t *members) {
    int64_t bucket[2][BUCKETS], above = 0; /* above: mass of the keys over the range; two halves against waiting */
    uint32_t low = key[0], high = key[0];
    for (int i = 1; i < n; i++) {
        low = key[i] < low ? key[i] : low;
        high = key[i] > high ? key[i] : high;
    }
    int count = n, is_whole = 1; /* until the first round ends, all entries are members */
    for (;;) {
        int shift = 0;
        while ((high - low) >> shift >= BUCKETS) shift++;
        int top = (int)((high - low) >> shift);
        for (int half = 0; half < 2; half++) memset(bucket[half], 0, sizeof **bucket * (top + 1));
        for (int m = 0; m < count; m++) {
            int i = is_whole ? m : members[m];
            bucket[m & 1][(key[i] - low) >> shift] += count_mass(w, i);
        }
        int b = top;
        while (b >= 0 && above + bucket[0][b] + bucket[1][b] < limit) {
            above += bucket[0][b] + bucket[1][b];
            b--;
        }
        if (b < 0) return (cut){0, n}; /* rounding of the limit: everything is kept */
        low += (uint32_t)b << shift;
        if (!shift) break;
        high = low + ((1u << shift) - 1);
        int kept = 0;
        if (is_whole) {
            for (int i = 0; i < n; i += LANES) {
                vu distance = load_words(key + i) - low;
                vi keep = (vi)(distance <= high - low) & (count_from(i) < n);
                if (is_any(keep)) kept = append_index(members, kept, count_from(i), keep);
            }
        } else {
            for (int m = 0; m < count; m++) {
                int i = members[m];
                members[kept] = i;
                kept += key[i] - low <= high - low;
            }
        }
        count = kept;
        is_whole = 0;
    }
    int last = -1;
    for (int m = 0; m < count && above < limit; m++) {
        int i = is_whole ? m : members[m];
        if (key[i] != low) continue;
        above += count_mass(w, i);
        last = i;
    }
    return (cut){low, last};
}

INLINE vi is_in_cut(cut c, vu key, vi index) {
    return (vi)(key > c.key) | ((vi)(key == c.key) & (index <= c.last));
}

#endif
