/* A block of consecutive rows of one request, whose attention by vectors shares the reading of keys and values. Every row has
 * the operations of the row alone in the same order, and so the same bits. */
#ifndef FD_ROW_BLOCK_H
#define FD_ROW_BLOCK_H

#include "attention_vectors.h"

enum {
    BLOCK_ROWS = 16,
    MAX_BLOCK_BYTES = 8 << 20, /* of a member's scores; with fewer rows in a block, more blocks read the keys again */
};

/* Ranks that a row sees: those before `shared` are those of the block's longest row, the rest is its own part. */
typedef struct {
    int from, shared, to;
} row_part;

typedef struct {
    const fd_attention *a;
    const fd_rows *rows;
    int first_row, num_rows, kv_head, first_head, heads; /* heads of every row, at most HEAD_BLOCK */
    int lo, hi;                                          /* ranks of the slots below */
    long ranks;                                          /* numbers from the scores of a head to those of the next */
    row_part parts[BLOCK_ROWS];
    int32_t *slots, *own_slots; /* [hi - lo] of the longest row; of a row's own part */
    float *scales[2];           /* [hi - lo] of int8 keys and values */
    float *scores;              /* [num_rows, heads, ranks], from the first key that the row sees */
} row_block;

/* Numbers of scores of one head of a row; the last vector of scores may begin at any rank. */
INLINE long score_ranks(long count) { return (count + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK + KEY_BLOCK; }

INLINE int limit_block_rows(const fd_rows *rows, int group) {
    long fitting = MAX_BLOCK_BYTES / (4 * score_ranks(rows->max_keys) * (group < HEAD_BLOCK ? group : HEAD_BLOCK));
    return fitting < 1 ? 1 : fitting > BLOCK_ROWS ? BLOCK_ROWS : (int)fitting;
}

/* Bytes of scratch memory for a block: slots, an own part's, two lists of scales, scores. */
INLINE long row_block_scratch(const fd_rows *rows, int group) {
    long heads = limit_block_rows(rows, group) * (group < HEAD_BLOCK ? group : HEAD_BLOCK);
    return 4 * score_ranks(rows->max_keys) * (4 + heads);
}

INLINE float *find_scores(const row_block *b, int row, int head) {
    return b->scores + (row * b->heads + head) * b->ranks;
}

/* Place of the first head of a row in `query` and `out`. */
INLINE long find_row(const row_block *b, int row) {
    const fd_attention *a = b->a;
    int head = b->kv_head * (a->heads / a->kv_heads) + b->first_head;
    return ((long)(b->first_row + row) * a->heads + head) * a->head_dim;
}

static void find_parts(row_block *b) {
    const fd_rows *rows = b->rows;
    int longest = find_longest(rows, b->first_row, b->num_rows), most = 0;
    b->hi = count_keys(rows, longest);
    b->lo = b->hi;
    for (int r = 0; r < b->num_rows; r++) {
        int row = b->first_row + r, to = count_keys(rows, row), from = first_key(b->a, row, to);
        int shared = rows->num_committed[row] + count_common(rows, row, longest) - from;
        b->parts[r] = (row_part){from, shared > 0 ? from + shared : from, to};
        if (from < b->lo) b->lo = from;
        if (to - from > most) most = to - from;
    }
    b->ranks = score_ranks(most);
    find_slots(rows, longest, b->lo, b->hi, b->slots);
}

/* Slots of the ranks that a row alone sees, from `from` on. Returns their number. */
static int find_own_slots(const row_block *b, int row, int from) {
    int to = b->parts[row].to;
    find_slots(b->rows, b->first_row + row, from, to, b->own_slots);
    return to - from;
}

/* Part of a row's shared ranks that lies in a chunk. */
INLINE row_part cut_part(row_part part, int first, int last) {
    if (part.from > first) first = part.from;
    if (part.shared < last) last = part.shared;
    return (row_part){first, last, last};
}

#endif
