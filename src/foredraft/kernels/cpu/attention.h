/* Attention of all rows of a pass over paged KV, in blocks of rows of one request. */
#ifndef FD_ATTENTION_H
#define FD_ATTENTION_H

#include "attention_block.h"
#include "attention_rows.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "attention_weights.h"
#include "team.h"

/* Rows of rounded results, [num_rows, heads, head_dim], with `stride` numbers from row to row; data NULL = none. */
typedef struct {
    rounded *data;
    long stride;
} rounded_rows;

#define MIN_SHARED_KEYS 1024 /* keys of all rows */
#define NOT_ROUNDED ((rounded_rows){0})

/* Writes the results of some rows and the heads of one key head rounded too. */
static void round_results(const fd_attention *a, int first, int count, int kv_head, rounded_rows to) {
    long width = (long)a->heads / a->kv_heads * a->head_dim;
    for (long row = first; to.data && row < first + count; row++) {
        const float *result = a->out + (row * a->kv_heads + kv_head) * width;
        round_row(result, (int)width, to.data + row * to.stride + kv_head * width);
    }
}

#if HAS_TILE_ATTENTION

INLINE int can_use_blocks(const fd_attention *a) { return a->kv_kind != FD_KV_F32 && a->head_dim % 32 == 0; }
INLINE long block_ranks(const fd_rows *rows) { return (rows->max_keys + KEY_TILE - 1l) / KEY_TILE * KEY_TILE + KEY_TILE; }

/* Most queries of a block. */
INLINE int limit_queries(const fd_rows *rows, int group) {
    long fitting = MAX_SCORE_BYTES / (4 * (block_ranks(rows) + QUERY_PADDING));
    int least = group < BLOCK_QUERIES ? group : BLOCK_QUERIES;
    return fitting < least ? least : fitting > BLOCK_QUERIES ? BLOCK_QUERIES : (int)fitting;
}

/* Slots, scales of two pools, both also for an own part, and scores. */
INLINE long block_scratch(const fd_rows *rows, int group) {
    long ranks = block_ranks(rows), queries = round_up(limit_queries(rows, group), 4);
    return 4 * (6 * ranks + queries * (ranks + QUERY_PADDING)) + 64;
}

static void attend_block(const fd_attention *a, const fd_rows *rows, int first, int count, int kv_head, char *scratch) {
    const long ranks = block_ranks(rows);
    const int group = a->heads / a->kv_heads;
    float *numbers = (float *)scratch;
    query_block b = {.a = a, .rows = rows, .first_row = first, .num_rows = count, .kv_head = kv_head,
                     .slots = (int32_t *)numbers, .own_slots = (int32_t *)(numbers + ranks),
                     .scales = {numbers + 2 * ranks, numbers + 3 * ranks}, .own_scales = numbers + 4 * ranks,
                     .scores = numbers + 6 * ranks};
    find_ranges(&b);
    b.stride = b.padded + QUERY_PADDING;
    if (has_infinite_values(&b)) {
        for (int r = first; r < first + count; r++) attend_block(a, rows, r, 1, kv_head, scratch);
        return;
    }
    for (int head = 0; head < group; head += b.heads) {
        b.first_head = head;
        b.heads = group - head < BLOCK_QUERIES ? group - head : BLOCK_QUERIES;
        score_block(&b);
        weigh_block(&b);
        add_up_block(&b);
    }
}

#else

INLINE int can_use_blocks(const fd_attention *a) { return (void)a, 0; }
INLINE int limit_queries(const fd_rows *rows, int group) { return (void)rows, (void)group, 0; }
INLINE long block_scratch(const fd_rows *rows, int group) { return (void)rows, (void)group, 0; }
INLINE void attend_block(const fd_attention *a, const fd_rows *rows, int first, int count, int kv_head, char *scratch) {
    (void)a, (void)rows, (void)first, (void)count, (void)kv_head, (void)scratch; /* never called */
}

#endif

/* Whether a row has the committed tokens of the row before, or, without any, a path from the same root. */
INLINE int continues_request(const fd_rows *rows, int row) {
    const int32_t *path = rows->path_slots + rows->path_offset[row], *before = rows->path_slots + rows->path_offset[row - 1];
    if (rows->page_offset[row] != rows->page_offset[row - 1]) return 0;
    if (rows->num_committed[row] != rows->num_committed[row - 1]) return 0;
    return rows->num_committed[row] || (rows->path_length[row] && rows->path_length[row - 1] && *path == *before);
}

/* Most rows of a block: as many as it holds, but enough blocks for all members. */
static int limit_rows(const fd_attention *a, const fd_rows *rows, int members) {
    int group = a->heads / a->kv_heads;
    int fitting = can_use_blocks(a) ? limit_queries(rows, group) / group : limit_block_rows(rows, group);
    int sharing = rows->num_rows * a->kv_heads / (2 * members);
    int limit = fitting < sharing ? fitting : sharing;
    return limit > 1 ? limit : 1;
}

/* Writes the first row of every block, and num_rows after the last. Returns the number of blocks. */
static int find_blocks(const fd_attention *a, const fd_rows *rows, int members, int32_t *first) {
    int limit = limit_rows(a, rows, members), count = 0;
    for (int row = 0; row < rows->num_rows; row++)
        if (row == 0 || row - first[count - 1] == limit || !continues_request(rows, row)) first[count++] = row;
    first[count] = rows->num_rows;
    return count;
}

/* Bytes of scratch memory per member. */
INLINE long attention_scratch(const fd_rows *rows, int group) {
    long by_blocks = max_long(block_scratch(rows, group), row_block_scratch(rows, group)) + 4l * rows->num_rows + 128;
    return (max_long(row_scratch(rows, group), by_blocks) + 63) / 64 * 64 + 64;
}

/* Whether rows that share keys are computed together. With bf16 products a row alone is as fast for few keys. */
INLINE int saves_time(const fd_attention *a, const fd_rows *rows, int row, int count) {
    return count > 1 && (is_by_floats(a) || (long)count * count_keys(rows, row) >= MIN_SHARED_KEYS);
}

/* Attention of every row; the members share the work. The results are written to `to` as well. */
static void attend_rows(const fd_attention *a, const fd_rows *rows, fd_team *team, char *scratch, rounded_rows to) {
    int32_t *first = (int32_t *)scratch;
    int has_tiles = can_use_blocks(a), blocks = find_blocks(a, rows, atomic_load(&team->size), first);
    char *rest = scratch + (4l * rows->num_rows + 4 + 63) / 64 * 64;
    FOR_EACH_ITEM(i, blocks * a->kv_heads) {
        int from = first[i / a->kv_heads], count = first[i / a->kv_heads + 1] - from, kv_head = i % a->kv_heads;
        if (has_tiles) attend_block(a, rows, from, count, kv_head, rest);
        else if (saves_time(a, rows, from, count)) attend_row_block(a, rows, from, count, kv_head, rest);
        else
            for (int row = from; row < from + count; row++) attend_row(a, rows, row, kv_head, rest);
        round_results(a, from, count, kv_head, to);
    }
}

#endif
