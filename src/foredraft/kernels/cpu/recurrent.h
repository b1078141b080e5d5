/* Recurrent parts of layers, over runs of rows: gated delta nets, Mamba-2 and gated short convolutions.
 *
 * A run reads the state after its parent and writes that after its last row; a parent's run stands before it. A work item
 * has some channels, or a head, of all runs, so no run waits for another member. The results of a row depend on the state
 * before it and on its own inputs alone: chunks, chains and trees have the same bits.
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

/* Advances `vectors` vectors of columns of a state, of which the last has n numbers: from *= decay, then adds the outer
 * product of the key and the value's share; returns the products with the query in `out`. */
INLINE void step_columns(const head_step *s, const float *from, float *to, const float *value, float *out, int vectors,
                         int n) {
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
        long at = (long)k * s->stride;
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
            vf x = multiply_add(key, added[v], load_part(from + at + v * LANES, n) * decay);
            store_part(to + at + v * LANES, x, n);
            sum[v] = multiply_add(x, query, sum[v]);
        }
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) store_part(out + v * LANES, sum[v], n);
}

static void step_head(const head_step *s, const float *from, float *to, const float *value, float *out) {
    int c = 0;
    for (; c + 8 * LANES <= s->stride; c += 8 * LANES) step_columns(s, from + c, to + c, value + c, out + c, 8, LANES);
    for (; c + 4 * LANES <= s->stride; c += 4 * LANES) step_columns(s, from + c, to + c, value + c, out + c, 4, LANES);
    for (; c + LANES <= s->stride; c += LANES) step_columns(s, from + c, to + c, value + c, out + c, 1, LANES);
    if (c < s->stride) step_columns(s, from + c, to + c, value + c, out + c, 1, s->stride - c);
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

static void step_delta(const fd_mixing *j, int row, int head, const float *from, float *to) {
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
    step_head(&s, from, to, all_keys + (long)m->groups * keys + (long)head * values, out);
    rms_norm(out, m->norm, m->eps, values, out);
    multiply_by_gate(x + m->gate_at + (long)head * values, values, out);
}

static void step_mamba(const fd_mixing *j, int row, int head, const float *from, float *to) {
    const fd_mixer *m = j->mixer;
    const float *x = projected_row(j, row);
    int values = m->value_dim, group = head / (m->heads / m->groups);
    const float *value = x + m->conv_at + (long)head * values;
    const float *keys = x + m->conv_at + (long)m->heads * values;
    float step = softplus(x[m->step_at + head] + m->step_bias[head]), *out = mixed_row(j, row) + (long)head * values;
    step = step < m->min_step ? m->min_step : step > m->max_step ? m->max_step : step;
    head_step s = {.key = keys + (long)group * m->key_dim, .query = keys + (long)(m->groups + group) * m->key_dim,
                   .decay = expf(m->rate[head] * step), .share = step, .keys = m->key_dim, .stride = values};
    step_head(&s, from, to, value, out);
    vf skip = broadcast(m->skip[head]);
    for (int i = 0; i < values; i += LANES)
        store_part(out + i, multiply_add(skip, load_part(value + i, values - i), load_part(out + i, values - i)),
                   values - i);
}

static void mix_head(const fd_mixing *j, int head) {
    const fd_mixer *m = j->mixer;
    const fd_runs *runs = j->runs;
    long size = (long)m->key_dim * m->value_dim;
    for (int r = 0; r < runs->num_runs; r++) {
        const float *from = j->states + ((long)runs->start_state[r] * m->heads + head) * size;
        float *to = j->states + ((long)runs->end_state[r] * m->heads + head) * size;
        int end = runs->first_row[r] + runs->length[r];
        for (int row = runs->first_row[r]; row < end; row++, from = to) {
            if (m->kind == FD_DELTA) step_delta(j, row, head, from, to);
            else step_mamba(j, row, head, from, to);
        }
    }
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
