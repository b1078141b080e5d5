/* Recurrent parts of layers, over runs of rows: gated delta nets, Mamba-2 and gated short convolutions.
 *
 * A run reads the state after its parent and writes that after its last row; a parent's run stands before it. A work
 * item has some channels, or some columns of the states of a head, of all runs, so no run waits for another member. The
 * results of a row depend on the state before it and on its own inputs alone: chunks, chains and trees have the same
 * bits.
 *
 * The states of all draft nodes leave the caches, and most are never read: writing them limits the speed. They are
 * streamed to the pool, which reads nothing first; runs that follow in this pass read a copy in the member's memory.
 */
#ifndef FD_RECURRENT_H
#define FD_RECURRENT_H

#include <math.h>

#include "activation.h"
#include "foredraft.h"
#include "norm.h"
#include "simd.h"
#include "team.h"

enum { MAX_TAPS = 8, CHANNEL_ITEM = 64 /* channels of a work item */ };
enum { BLOCK_BYTES = 32 << 10 /* most bytes of columns of a state of a work item, a part of the first cache */ };
enum { SLOT_BYTES = 1 << 20 /* most memory for states that a member keeps, a part of its second cache */ };
enum { MAX_VECTORS = 4, COLUMN_STEP = 16 /* columns of a block are a multiple of it, in every instruction set */ };
enum { TO_SLOT, TO_POOL, TO_BOTH };
#define LENGTH_EPS 1e-6f /* of the lengths of queries and keys, as in transformers */

/* The first n numbers of a vector, the others 0. */
INLINE vf load_part(const float *p, int n) {
    if (n >= LANES) return load(p);
    float part[LANES] = {0};
    memcpy(part, p, (size_t)n * 4);
    return load(part);
}

INLINE void store_part(float *p, vf x, int n) {
    float part[LANES];
    if (n >= LANES) {
        store(p, x);
        return;
    }
    store(part, x);
    memcpy(p, part, (size_t)n * 4);
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
INLINE float *projected_row(const fd_mixing *j, int row) { return j->projected + (long)row * j->mixer->width; }
INLINE float *mixed_row(const fd_mixing *j, int row) { return j->out + (long)row * j->mixer->inner; }

/* Convolution of up to LANES channels of one row: the sum over the inputs before it, the oldest first, then its own. */
INLINE vf convolve(const vf *weight, vf bias, vf *past, vf x, int taps) {
    vf sum = bias;
    _Pragma("GCC unroll 8") for (int i = 0; i < taps - 1; i++) sum = multiply_add(weight[i], past[i], sum);
    sum = multiply_add(weight[taps - 1], x, sum);
    _Pragma("GCC unroll 8") for (int i = 0; i < taps - 2; i++) past[i] = past[i + 1];
    past[taps - 2] = x;
    return sum;
}

/* Convolution of the channels [c, c + n), n <= LANES, of all runs: in place or, of a short one, to the output. */
INLINE void convolve_vector(const fd_mixing *j, int c, int n, int taps, int is_short) {
    const fd_mixer *m = j->mixer;
    const fd_runs *runs = j->runs;
    long channels = m->channels, size = channels * (taps - 1), width = m->width;
    vf weight[MAX_TAPS], past[MAX_TAPS], bias = {0};
    _Pragma("GCC unroll 8") for (int i = 0; i < taps; i++) weight[i] = load_part(m->conv_weight + i * channels + c, n);
    if (m->conv_bias) bias = load_part(m->conv_bias + c, n);
    for (int r = 0; r < runs->num_runs; r++) {
        const float *from = j->conv_states + runs->start_state[r] * size + c;
        float *to = j->conv_states + runs->end_state[r] * size + c;
        _Pragma("GCC unroll 8") for (int i = 0; i < taps - 1; i++) past[i] = load_part(from + i * channels, n);
        int row = runs->first_row[r], end = row + runs->length[r];
        float *x = projected_row(j, row) + m->conv_at + c, *out = mixed_row(j, row) + c;
        for (; row < end; row++, x += width, out += channels) {
            if (is_short) { /* the row is [B, C, x] */
                vf y = convolve(weight, bias, past, load_part(x, n) * load_part(x + 2 * channels, n), taps);
                store_part(out, load_part(x + channels, n) * y, n);
            } else {
                vf y = convolve(weight, bias, past, load_part(x, n), taps);
                store_part(x, y * vsigmoid(y), n);
            }
        }
        _Pragma("GCC unroll 8") for (int i = 0; i < taps - 1; i++) store_part(to + i * channels, past[i], n);
    }
}

/* The usual numbers of taps are constants to the compiler. */
static void convolve_channels(const fd_mixing *j, int c, int n) {
    int taps = j->mixer->taps, is_short = j->mixer->kind == FD_SHORT_CONV;
    if (is_short && taps == 3 && n == LANES) convolve_vector(j, c, LANES, 3, 1);
    else if (is_short) convolve_vector(j, c, n, taps, 1);
    else if (taps == 4 && n == LANES) convolve_vector(j, c, LANES, 4, 0);
    else convolve_vector(j, c, n, taps, 0);
}

/* y = scale * x / |x|; y and x may be equal. */
static void scale_to_length(const float *x, float scale, int n, float *y) {
    vf squares = {0};
    for (int i = 0; i < n; i += LANES) {
        vf part = load_part(x + i, n - i);
        squares = multiply_add(part, part, squares);
    }
    scale /= __builtin_sqrtf(reduce_sum(squares) + LENGTH_EPS);
    for (int i = 0; i < n; i += LANES) store_part(y + i, load_part(x + i, n - i) * scale, n - i);
}

INLINE float clamp_step(const fd_mixer *m, float step) {
    return step < m->min_step ? m->min_step : step > m->max_step ? m->max_step : step;
}

/* Replaces the queries and keys of a group by those of length 1, and the numbers of its heads by what their steps need:
 * the state's decay and the value's share, or the length of the step. */
static void prepare_group(const fd_mixing *j, int row, int group) {
    const fd_mixer *m = j->mixer;
    float *x = projected_row(j, row), *query = x + m->conv_at + (long)group * m->key_dim;
    int per_group = m->heads / m->groups, end = (group + 1) * per_group;
    if (m->kind == FD_DELTA) {
        float *key = query + (long)m->groups * m->key_dim;
        scale_to_length(query, 1.0f / __builtin_sqrtf((float)m->key_dim), m->key_dim, query);
        scale_to_length(key, 1.0f, m->key_dim, key);
    }
    for (int head = group * per_group; head < end; head++) {
        float step = softplus(x[m->step_at + head] + m->step_bias[head]);
        if (m->kind == FD_MAMBA2) {
            x[m->step_at + head] = clamp_step(m, step);
            continue;
        }
        x[m->step_at + head] = expf(m->rate[head] * step);
        x[m->share_at + head] = 1.0f / (1.0f + expf(-x[m->share_at + head]));
    }
}

/* A step of some columns of a head's state. Functions take it by value: stores of numbers might change the original. */
typedef struct {
    const float *key, *query; /* [keys] */
    const float *value;
    float *out;
    float decay;
    float share; /* of the value, or of its difference from what the state returns for the key */
    float skip;  /* of the value in the output */
    int keys, is_delta;
    const float *from; /* state before the step */
    float *slot, *pool; /* where the state after it goes; `from` and `slot` may be equal */
    int stride;         /* columns */
    int target; /* TO_SLOT, TO_POOL or TO_BOTH */
    int can_stream;
} column_step;

/* Products of `vectors` columns from c with the key. Keys with even and odd index have sums of their own, because one
 * chain would wait for every addition. */
INLINE void recall(column_step s, int c, int vectors, int n, vf *sum) {
    vf odd[MAX_VECTORS];
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) sum[v] = odd[v] = (vf){0};
    int k = 0;
    for (; k + 2 <= s.keys; k += 2) {
        const float *a = s.from + (long)k * s.stride + c, *b = a + s.stride;
        vf first = broadcast(s.key[k]), second = broadcast(s.key[k + 1]);
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
            sum[v] = multiply_add(load_part(a + v * LANES, n), first, sum[v]);
            odd[v] = multiply_add(load_part(b + v * LANES, n), second, odd[v]);
        }
    }
    if (k < s.keys) {
        const float *a = s.from + (long)k * s.stride + c;
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++)
            sum[v] = multiply_add(load_part(a + v * LANES, n), broadcast(s.key[k]), sum[v]);
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) sum[v] += odd[v];
}

/* Row k of `vectors` columns after the step, stored; adds its product with the query. */
INLINE void advance_row(column_step s, int target, int can_stream, int k, int c, int vectors, int n,
                        const vf *added, vf *sum) {
    vf key = broadcast(s.key[k]), query = broadcast(s.query[k]), decay = broadcast(s.decay);
    long at = (long)k * s.stride + c;
    const float *from = s.from + at;
    float *slot = s.slot + at, *pool = s.pool + at;
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
        vf x = multiply_add(key, added[v], load_part(from + v * LANES, n) * decay);
        if (target != TO_POOL) store_part(slot + v * LANES, x, n);
        if (target != TO_SLOT) {
            if (can_stream) stream(pool + v * LANES, x);
            else store_part(pool + v * LANES, x, n);
        }
        sum[v] = multiply_add(x, query, sum[v]);
    }
}

/* Advances `vectors` vectors of columns from c, of which the last has n numbers: the state times its decay, plus the
 * outer product of the key and the value's share. The output is its product with the query. */
INLINE void step_columns(column_step s, int target, int can_stream, int c, int vectors, int n) {
    vf added[MAX_VECTORS], sum[MAX_VECTORS], odd[MAX_VECTORS];
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) sum[v] = (vf){0};
    if (s.is_delta) recall(s, c, vectors, n, sum);
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
        added[v] = (load_part(s.value + c + v * LANES, n) - sum[v] * s.decay) * s.share;
        sum[v] = odd[v] = (vf){0};
    }
    int k = 0;
    for (; k + 2 <= s.keys; k += 2) {
        advance_row(s, target, can_stream, k, c, vectors, n, added, sum);
        advance_row(s, target, can_stream, k + 1, c, vectors, n, added, odd);
    }
    if (k < s.keys) advance_row(s, target, can_stream, k, c, vectors, n, added, sum);
    vf skip = broadcast(s.skip);
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++)
        store_part(s.out + c + v * LANES, multiply_add(skip, load_part(s.value + c + v * LANES, n), sum[v] + odd[v]),
                   n);
}

INLINE void step_all_columns(column_step s, int target, int can_stream, int columns) {
    int c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES) step_columns(s, target, can_stream, c, 4, LANES);
    for (; c + LANES <= columns; c += LANES) step_columns(s, target, can_stream, c, 1, LANES);
    if (c < columns) step_columns(s, target, can_stream, c, 1, columns - c);
}

/* The arguments are constants to the compiler, so that no loop has a branch. */
static void advance_columns(const column_step *s, int columns) {
    if (s->target == TO_SLOT) step_all_columns(*s, TO_SLOT, 0, columns);
    else if (!s->can_stream) step_all_columns(*s, s->target, 0, columns);
    else if (s->target == TO_POOL) step_all_columns(*s, TO_POOL, 1, columns);
    else step_all_columns(*s, TO_BOTH, 1, columns);
}

/* Fills in the inputs of a step of the columns from `column` of a head. */
static void read_inputs(const fd_mixing *j, int row, int head, int column, column_step *s) {
    const fd_mixer *m = j->mixer;
    const float *x = projected_row(j, row), *first = x + m->conv_at;
    long group = head / (m->heads / m->groups), keys = m->key_dim, at = (long)head * m->value_dim + column;
    s->out = mixed_row(j, row) + at;
    if (m->kind == FD_DELTA) {
        s->query = first + group * keys;
        s->key = first + (m->groups + group) * keys;
        s->value = first + 2 * m->groups * keys + at;
        s->decay = x[m->step_at + head];
        s->share = x[m->share_at + head];
    } else {
        const float *all_keys = first + (long)m->heads * m->value_dim;
        s->value = first + at;
        s->key = all_keys + group * keys;
        s->query = all_keys + (m->groups + group) * keys;
        s->share = x[m->step_at + head];
        s->decay = expf(m->rate[head] * s->share);
        s->skip = m->skip[head];
    }
}

/* Columns of a head's state that a work item takes. In the pool they are adjacent: a state of a head is a sequence of
 * such blocks, [keys, columns]. */
INLINE int block_columns(const fd_mixer *m) {
    int columns = BLOCK_BYTES / (m->key_dim * 4) / COLUMN_STEP * COLUMN_STEP;
    return columns < COLUMN_STEP ? COLUMN_STEP : columns < m->value_dim ? columns : m->value_dim;
}

/* Columns from `column` of a head's state. */
INLINE float *find_state(const fd_mixing *j, int state, int head, int column) {
    const fd_mixer *m = j->mixer;
    return j->states + (((long)state * m->heads + head) * m->value_dim + column) * m->key_dim;
}

/* All runs of the columns from `column` of a head. Without a slot, the states of a run are in the pool, all where it
 * ends. */
static void mix_columns(const fd_mixing *j, int head, int column) {
    const fd_mixer *m = j->mixer;
    const fd_runs *runs = j->runs;
    int width = block_columns(m), columns = m->value_dim - column < width ? m->value_dim - column : width;
    long size = (long)m->key_dim * columns;
    float *slots = fd_thread_memory(SLOT_BYTES);
    int num_slots = slots ? (int)(SLOT_BYTES / (size * 4)) : 0;
    int is_aligned = (uintptr_t)find_state(j, 0, head, column) % (LANES * 4) == 0;
    column_step s = {.keys = m->key_dim, .is_delta = m->kind == FD_DELTA, .stride = columns,
                     .can_stream = columns % LANES == 0 && m->value_dim % LANES == 0 && is_aligned};
    for (int r = 0; r < runs->num_runs; r++) {
        int slot = runs->slot[r], from = runs->start_slot[r], end = runs->first_row[r] + runs->length[r];
        int has_slot = slot >= 0 && slot < num_slots, is_kept = from >= 0 && from < num_slots;
        s.pool = find_state(j, runs->end_state[r], head, column);
        s.slot = has_slot ? slots + slot * size : s.pool;
        s.from = is_kept ? slots + from * size : find_state(j, runs->start_state[r], head, column);
        for (int row = runs->first_row[r]; row < end; row++) {
            s.target = row + 1 < end ? TO_SLOT : has_slot ? TO_BOTH : TO_POOL;
            read_inputs(j, row, head, column, &s);
            advance_columns(&s, columns);
            s.from = s.slot;
        }
    }
    finish_streams();
}

/* y *= silu(gate) */
static void multiply_by_gate(const float *gate, int n, float *y) {
    for (int i = 0; i < n; i += LANES) {
        vf g = load_part(gate + i, n - i);
        store_part(y + i, load_part(y + i, n - i) * (g * vsigmoid(g)), n - i);
    }
}

/* Norm and gate of the outputs that are normed together: of a head in this order, of MAMBA2 in the other one. */
static void norm_and_gate(const fd_mixing *j, int row, int part) {
    const fd_mixer *m = j->mixer;
    long at = (long)part * m->norm_width;
    float *y = mixed_row(j, row) + at;
    const float *gate = projected_row(j, row) + m->gate_at + at;
    if (m->kind == FD_DELTA) rms_norm(y, m->norm, m->eps, m->norm_width, y);
    multiply_by_gate(gate, m->norm_width, y);
    if (m->kind == FD_MAMBA2 && m->norm) rms_norm(y, m->norm + at, m->eps, m->norm_width, y);
}

/* From the projected rows to the rows of the output projection. Every member calls it. */
static void run_mixer(fd_team *team, const fd_mixing *j) {
    const fd_mixer *m = j->mixer;
    FOR_EACH_ITEM(i, (m->channels + CHANNEL_ITEM - 1) / CHANNEL_ITEM) {
        int end = (i + 1) * CHANNEL_ITEM < m->channels ? (i + 1) * CHANNEL_ITEM : m->channels;
        for (int c = i * CHANNEL_ITEM; c < end; c += LANES) convolve_channels(j, c, end - c < LANES ? end - c : LANES);
    }
    fd_barrier(team);
    if (m->kind == FD_SHORT_CONV) return;
    FOR_EACH_ITEM(i, j->num_rows * m->groups) prepare_group(j, i / m->groups, i % m->groups);
    fd_barrier(team);
    int width = block_columns(m), blocks = (m->value_dim + width - 1) / width;
    FOR_EACH_ITEM(i, m->heads * blocks) mix_columns(j, i / blocks, i % blocks * width);
    fd_barrier(team);
    int parts = m->inner / m->norm_width;
    FOR_EACH_ITEM(i, j->num_rows * parts) norm_and_gate(j, i / parts, i % parts);
    fd_barrier(team);
}

static void mix_body(void *arg, fd_team *team) { run_mixer(team, arg); }
static void mix_rows(const fd_mixing *j) { fd_parallel(mix_body, (void *)j); }

#endif
