/* Recurrent parts of layers, over runs of rows: gated delta nets, Mamba-2 and gated short convolutions.
 *
 * A run reads the state after its parent and writes that after its last row; a parent's run stands before it. A work item
 * has some channels, or a head, of all runs, so no run waits for another member. The results of a row depend on the state
 * before it and on its own inputs alone: chunks, chains and trees have the same bits.
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
enum { SLOT_BYTES = 1 << 20 /* most memory for states that a member keeps, a part of its cache */ };
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
INLINE vf convolve(const fd_mixer *m, const vf *weight, vf bias, vf *past, vf x) {
    vf sum = bias;
    for (int i = 0; i < m->taps - 1; i++) sum = multiply_add(weight[i], past[i], sum);
    sum = multiply_add(weight[m->taps - 1], x, sum);
    for (int i = 0; i + 1 < m->taps - 1; i++) past[i] = past[i + 1];
    if (m->taps > 1) past[m->taps - 2] = x;
    return sum;
}

/* Convolution of the channels [c, c + n), n <= LANES, of a row, in place or, of a short convolution, to the output. */
INLINE void convolve_row(const fd_mixing *j, const vf *weight, vf bias, vf *past, int row, int c, int n) {
    const fd_mixer *m = j->mixer;
    float *x = projected_row(j, row) + m->conv_at + c;
    if (m->kind != FD_SHORT_CONV) {
        vf y = convolve(m, weight, bias, past, load_part(x, n));
        store_part(x, y * vsigmoid(y), n);
        return;
    }
    vf in = load_part(x, n) * load_part(x + 2l * m->channels, n); /* the row is [B, C, x] */
    vf y = load_part(x + m->channels, n) * convolve(m, weight, bias, past, in);
    store_part(mixed_row(j, row) + c, y, n);
}

static void convolve_channels(const fd_mixing *j, int c, int n) {
    const fd_mixer *m = j->mixer;
    const fd_runs *runs = j->runs;
    int num_past = m->taps - 1;
    vf weight[MAX_TAPS], past[MAX_TAPS], bias = {0};
    for (int i = 0; i < m->taps; i++) weight[i] = load_part(m->conv_weight + (long)i * m->channels + c, n);
    if (m->conv_bias) bias = load_part(m->conv_bias + c, n);
    for (int r = 0; r < runs->num_runs; r++) {
        const float *from = j->conv_states + (long)runs->start_state[r] * num_past * m->channels + c;
        float *to = j->conv_states + (long)runs->end_state[r] * num_past * m->channels + c;
        for (int i = 0; i < num_past; i++) past[i] = load_part(from + (long)i * m->channels, n);
        int end = runs->first_row[r] + runs->length[r];
        for (int row = runs->first_row[r]; row < end; row++) convolve_row(j, weight, bias, past, row, c, n);
        for (int i = 0; i < num_past; i++) store_part(to + (long)i * m->channels, past[i], n);
    }
}

/* A step of one head, or the factors that all of its columns have in common. */
typedef struct {
    const float *key, *query; /* [key_dim] */
    float decay;
    float share; /* of the new value, or of its difference from what the state returns for the key */
    int keys, stride, is_delta;
} head_step;

/* A state before a step, and where that after it goes. `from` and `slot` may be equal. */
typedef struct {
    const float *from;
    float *slot, *pool;
    int target; /* TO_SLOT, TO_POOL or TO_BOTH */
    int can_stream;
} step_state;

/* Advances `vectors` vectors of columns from c of a state, of which the last has n numbers: the state times its decay,
 * plus the outer product of the key and the value's share; returns the products with the query in `out`. */
INLINE void step_columns(const head_step *s, const step_state *at, int target, int can_stream, const float *value,
                         float *out, int c, int vectors, int n) {
    const float *from = at->from + c;
    float *slot = at->slot + c, *pool = at->pool + c;
    value += c;
    out += c;
    vf added[8], sum[8];
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) sum[v] = (vf){0};
    if (s->is_delta) {
        for (int k = 0; k < s->keys; k++) {
            vf key = broadcast(s->key[k]);
            const float *row = from + (long)k * s->stride;
            _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++)
                sum[v] = multiply_add(load_part(row + v * LANES, n), key, sum[v]);
        }
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
        added[v] = (load_part(value + v * LANES, n) - sum[v] * s->decay) * s->share;
        sum[v] = (vf){0};
    }
    vf decay = broadcast(s->decay);
    for (int k = 0; k < s->keys; k++) {
        vf key = broadcast(s->key[k]), query = broadcast(s->query[k]);
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
            long i = (long)k * s->stride + v * LANES;
            vf x = multiply_add(key, added[v], load_part(from + i, n) * decay);
            if (target != TO_POOL) store_part(slot + i, x, n);
            if (target != TO_SLOT) {
                if (can_stream) stream(pool + i, x);
                else store_part(pool + i, x, n);
            }
            sum[v] = multiply_add(x, query, sum[v]);
        }
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) store_part(out + v * LANES, sum[v], n);
}

INLINE void step_all_columns(const head_step *s, const step_state *at, int target, int can_stream, const float *value,
                             float *out) {
    int c = 0;
    for (; c + 8 * LANES <= s->stride; c += 8 * LANES) step_columns(s, at, target, can_stream, value, out, c, 8, LANES);
    for (; c + 4 * LANES <= s->stride; c += 4 * LANES) step_columns(s, at, target, can_stream, value, out, c, 4, LANES);
    for (; c + LANES <= s->stride; c += LANES) step_columns(s, at, target, can_stream, value, out, c, 1, LANES);
    if (c < s->stride) step_columns(s, at, target, can_stream, value, out, c, 1, s->stride - c);
}

/* The arguments are constants to the compiler, so that no loop has a branch. */
static void step_head(const head_step *s, const step_state *at, const float *value, float *out) {
    if (at->target == TO_SLOT) step_all_columns(s, at, TO_SLOT, 0, value, out);
    else if (!at->can_stream) step_all_columns(s, at, at->target, 0, value, out);
    else if (at->target == TO_POOL) step_all_columns(s, at, TO_POOL, 1, value, out);
    else step_all_columns(s, at, TO_BOTH, 1, value, out);
}

/* y = scale * x / |x| */
static void scale_to_length(const float *x, float scale, int n, float *y) {
    vf squares = {0};
    for (int i = 0; i < n; i += LANES) {
        vf part = load_part(x + i, n - i);
        squares = multiply_add(part, part, squares);
    }
    scale /= __builtin_sqrtf(reduce_sum(squares) + LENGTH_EPS);
    for (int i = 0; i < n; i += LANES) store_part(y + i, load_part(x + i, n - i) * scale, n - i);
}

/* y *= silu(gate) */
static void multiply_by_gate(const float *gate, int n, float *y) {
    for (int i = 0; i < n; i += LANES) {
        vf g = load_part(gate + i, n - i);
        store_part(y + i, load_part(y + i, n - i) * (g * vsigmoid(g)), n - i);
    }
}

static void step_delta(const fd_mixing *j, int row, int head, const step_state *at) {
    const fd_mixer *m = j->mixer;
    const float *x = projected_row(j, row);
    int keys = m->key_dim, values = m->value_dim, group = head / (m->heads / m->groups);
    float key[keys], query[keys], *out = mixed_row(j, row) + (long)head * values;
    const float *queries = x + m->conv_at, *all_keys = queries + (long)m->groups * keys;
    scale_to_length(queries + (long)group * keys, 1.0f / __builtin_sqrtf((float)keys), keys, query);
    scale_to_length(all_keys + (long)group * keys, 1.0f, keys, key);
    float step = softplus(x[m->step_at + head] + m->step_bias[head]);
    head_step s = {.key = key, .query = query, .decay = expf(m->rate[head] * step), .keys = keys, .stride = values,
                   .share = 1.0f / (1.0f + expf(-x[m->share_at + head])), .is_delta = 1};
    step_head(&s, at, all_keys + (long)m->groups * keys + (long)head * values, out);
    rms_norm(out, m->norm, m->eps, values, out);
    multiply_by_gate(x + m->gate_at + (long)head * values, values, out);
}

static void step_mamba(const fd_mixing *j, int row, int head, const step_state *at) {
    const fd_mixer *m = j->mixer;
    const float *x = projected_row(j, row);
    int values = m->value_dim, group = head / (m->heads / m->groups);
    const float *value = x + m->conv_at + (long)head * values;
    const float *keys = x + m->conv_at + (long)m->heads * values;
    float step = softplus(x[m->step_at + head] + m->step_bias[head]), *out = mixed_row(j, row) + (long)head * values;
    step = step < m->min_step ? m->min_step : step > m->max_step ? m->max_step : step;
    head_step s = {.key = keys + (long)group * m->key_dim, .query = keys + (long)(m->groups + group) * m->key_dim,
                   .decay = expf(m->rate[head] * step), .share = step, .keys = m->key_dim, .stride = values};
    step_head(&s, at, value, out);
    vf skip = broadcast(m->skip[head]);
    for (int i = 0; i < values; i += LANES)
        store_part(out + i, multiply_add(skip, load_part(value + i, values - i), load_part(out + i, values - i)),
                   values - i);
}

INLINE float *find_state(const fd_mixing *j, int state, int head) {
    return j->states + ((long)state * j->mixer->heads + head) * j->mixer->key_dim * j->mixer->value_dim;
}

/* All runs of a head. Without a slot the states of a run are in the pool, all of them in that of its end. */
static void mix_head(const fd_mixing *j, int head) {
    const fd_mixer *m = j->mixer;
    const fd_runs *runs = j->runs;
    long size = (long)m->key_dim * m->value_dim;
    float *slots = fd_thread_memory(SLOT_BYTES);
    int num_slots = slots ? (int)(SLOT_BYTES / (size * 4)) : 0;
    int can_stream = m->value_dim % LANES == 0 && (uintptr_t)j->states % (LANES * 4) == 0;
    for (int r = 0; r < runs->num_runs; r++) {
        int slot = runs->slot[r], from = runs->start_slot[r], end = runs->first_row[r] + runs->length[r];
        int has_slot = slot >= 0 && slot < num_slots;
        step_state at = {.pool = find_state(j, runs->end_state[r], head), .can_stream = can_stream};
        at.slot = has_slot ? slots + slot * size : at.pool;
        at.from = from >= 0 && from < num_slots ? slots + from * size : find_state(j, runs->start_state[r], head);
        for (int row = runs->first_row[r]; row < end; row++, at.from = at.slot) {
            at.target = row + 1 < end ? TO_SLOT : has_slot ? TO_BOTH : TO_POOL;
            if (m->kind == FD_DELTA) step_delta(j, row, head, &at);
            else step_mamba(j, row, head, &at);
        }
    }
    finish_streams();
}

/* Gate, then norm, of all heads that are normed together. */
static void gate_and_norm(const fd_mixing *j, int row, int part) {
    const fd_mixer *m = j->mixer;
    long at = (long)part * m->norm_width;
    float *y = mixed_row(j, row) + at;
    multiply_by_gate(projected_row(j, row) + m->gate_at + at, m->norm_width, y);
    if (m->norm) rms_norm(y, m->norm + at, m->eps, m->norm_width, y);
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
    FOR_EACH_ITEM(head, m->heads) mix_head(j, head);
    fd_barrier(team);
    if (m->kind == FD_DELTA) return;
    int parts = m->inner / m->norm_width;
    FOR_EACH_ITEM(i, j->num_rows * parts) gate_and_norm(j, i / parts, i % parts);
    fd_barrier(team);
}

static void mix_body(void *arg, fd_team *team) { run_mixer(team, arg); }
static void mix_rows(const fd_mixing *j) { fd_parallel(mix_body, (void *)j); }

#endif
