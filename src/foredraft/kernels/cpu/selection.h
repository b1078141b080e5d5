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

/* Finds the entries that come first by descending key and ascending index, until their masses reach `limit`, the
 * crossing entry included. w NULL: every entry has mass 1. members: [n] scratch. */
static cut find_cut(const uint32_t *key, const float *w, int n, int64_t limit, int32_t *members) {
    int64_t bucket[BUCKETS], above = 0; /* above: mass of the keys over the range */
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
        memset(bucket, 0, sizeof *bucket * (top + 1));
        for (int m = 0; m < count; m++) {
            int i = is_whole ? m : members[m];
            bucket[(key[i] - low) >> shift] += w ? count_units(w[i]) : 1;
        }
        int b = top;
        while (b >= 0 && above + bucket[b] < limit) above += bucket[b--];
        if (b < 0) return (cut){0, n}; /* rounding of the limit: everything is kept */
        low += (uint32_t)b << shift;
        if (!shift) break;
        high = low + ((1u << shift) - 1);
        int kept = 0;
        for (int m = 0; m < count; m++) {
            int i = is_whole ? m : members[m];
            members[kept] = i;
            kept += key[i] - low <= high - low;
        }
        count = kept;
        is_whole = 0;
    }
    int last = -1;
    for (int m = 0; m < count && above < limit; m++) {
        int i = is_whole ? m : members[m];
        if (key[i] != low) continue;
        above += w ? count_units(w[i]) : 1;
        last = i;
    }
    return (cut){low, last};
}

INLINE int is_in_cut(cut c, uint32_t key, int index) { return key > c.key || (key == c.key && index <= c.last); }

#endif
