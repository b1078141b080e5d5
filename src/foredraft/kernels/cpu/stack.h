/* A forward pass of a decoder. The team enters once and synchronises at barriers.
 *
 * The residual stream is float32 from the embeddings to the logits; only the inputs of products are rounded.
 */
#ifndef FD_STACK_H
#define FD_STACK_H

#include "attention.h"
#include "foredraft.h"
#include "linear.h"
#include "simd.h"

INLINE char *align(char *p) { return (char *)(((uintptr_t)p + 63) & ~(uintptr_t)63); }
INLINE long most(long a, long b) { return a > b ? a : b; }

typedef struct {
    const fd_model *m;
    const fd_window *w;
    const fd_pass *p;
    char *input;                        /* rows in the format of the products */
    float *hidden, *qkv, *mixed, *inner; /* [rows, ...] */
    char *scores;
    atomic_int members;
} stack;

INLINE long mlp_row(const fd_layer *l) { return most(row_bytes(&l->gate_up), row_bytes(&l->down)); }

INLINE long input_row(const fd_model *m) {
    long bytes = most(row_bytes(&m->head), row_bytes(&m->join));
    if (m->adapter) bytes = most(bytes, mlp_row(m->adapter));
    for (int i = 0; i < m->layers; i++) {
        const fd_layer *l = m->layer + i;
        bytes = most(bytes, most(most(row_bytes(&l->qkv), row_bytes(&l->out)), mlp_row(l)));
    }
    return bytes;
}

INLINE long qkv_width(const fd_model *m) { return (long)(m->heads + 2 * m->kv_heads) * m->head_dim; }

static int64_t stack_scratch(const fd_model *m, const fd_window *w, int threads) {
    long row = input_row(m) + 4 * ((long)m->hidden + qkv_width(m) + (long)m->heads * m->head_dim + m->inner);
    return row * w->rows + threads * attention_scratch(w, m->heads / m->kv_heads) + 6 * 64;
}

static void lay_out(stack *s) {
    const fd_model *m = s->m;
    long rows = s->w->rows;
    s->input = align(s->p->scratch);
    s->hidden = (float *)align(s->input + rows * input_row(m));
    s->qkv = (float *)align((char *)(s->hidden + rows * m->hidden));
    s->mixed = (float *)align((char *)(s->qkv + rows * qkv_width(m)));
    s->inner = (float *)align((char *)(s->mixed + rows * m->heads * m->head_dim));
    s->scores = align((char *)(s->inner + rows * m->inner));
}

/* y = x / rms(x) * weight; without a weight y = x */
static void normalise(const float *x, const float *weight, float eps, int n, float *y) {
    if (!weight) {
        memcpy(y, x, (size_t)n * 4);
        return;
    }
    vf squares = {0};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
    for (; i < n; i++) rest = multiply_add_one(x[i], x[i], rest);
    float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* Rotary embedding in place; it rotates the two halves of the first `rotary` values. */
static void rotate(float *x, const float *cos, const float *sin, int rotary) {
    int half = rotary / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, multiply_add(a, c, -(b * s)));
        store(x + half + i, multiply_add(b, c, a * s));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = multiply_add_one(a, cos[i], -(b * sin[i]));
        x[half + i] = multiply_add_one(b, cos[i], a * sin[i]);
    }
}

static void keep(void *to, long at, const float *x, int n, int has_bf16) {
    if (!has_bf16) {
        memcpy((float *)to + at, x, (size_t)n * 4);
        return;
    }
    for (int i = 0; i < n; i += LANES) store_bf16((uint16_t *)to + at + i, load(x + i));
}

static void embed(const stack *s, int row, float *to) {
    const fd_model *m = s->m;
    long at = (long)s->w->tokens[row] * m->hidden;
    for (int i = 0; i < m->hidden; i++) {
        float x = m->has_bf16_embedding ? widen(((const uint16_t *)m->embedding)[at + i])
                                        : ((const float *)m->embedding)[at + i];
        to[i] = x * m->embedding_scale;
    }
}

/* Converts residual row `of`, normalised, to row `to` of the input of `w`. */
static void read_hidden(const stack *s, const fd_weight *w, const float *norm, int of, int to) {
    const float *h = s->hidden + (long)of * s->m->hidden;
    float room[s->m->hidden];
    normalise(h, norm, s->m->eps, s->m->hidden, room);
    prepare(w, room, s->input + to * row_bytes(w));
}

/* Concatenates a row's embedding and input, each normed if it has a norm, as a row of the input of `w`. */
static void read_pair(const stack *s, const fd_weight *w, const float *norm, const float *input_norm, int row) {
    const fd_model *m = s->m;
    const float *input = s->p->inputs + (long)row * m->hidden;
    float room[2 * m->hidden];
    embed(s, row, room);
    if (norm) normalise(room, norm, m->eps, m->hidden, room);
    normalise(input, input_norm, m->eps, m->hidden, room + m->hidden);
    prepare(w, room, s->input + row * row_bytes(w));
}

/* Rotates one head of one row, and writes keys and values to the pool. Heads: queries, then keys, then values. */
static void place(const stack *s, int layer, int row, int head) {
    const fd_model *m = s->m;
    const fd_layer *l = m->layer + layer;
    float *x = s->qkv + row * qkv_width(m) + (long)head * m->head_dim;
    long slot = s->w->write[row], stride = (long)m->kv_heads * m->head_dim;
    int kv = head - m->heads, position = s->w->start[row] + s->w->tail[row] - 1;
    if (kv >= m->kv_heads) {
        kv -= m->kv_heads;
        keep(s->p->values[layer], slot * stride + (long)kv * m->head_dim, x, m->head_dim, m->has_bf16_kv);
        return;
    }
    const float *norm = kv < 0 ? l->q_norm : l->k_norm;
    if (norm) normalise(x, norm, m->eps, m->head_dim, x);
    rotate(x, m->cos + (long)position * m->rotary / 2, m->sin + (long)position * m->rotary / 2, m->rotary);
    if (kv >= 0) keep(s->p->keys[layer], slot * stride + (long)kv * m->head_dim, x, m->head_dim, m->has_bf16_kv);
    else memcpy(s->mixed + ((long)row * m->heads + head) * m->head_dim, x, (size_t)m->head_dim * 4);
}

#define EACH(i, count) for (int i; (i = fd_take(team, 1)) < (count);)

/* Copies the residual stream to every tap of this layer boundary. */
static void tap(stack *s, fd_team *team, int boundary) {
    const fd_model *m = s->m;
    const float *norm = boundary == FD_NORMED ? m->norm : NULL;
    for (int t = 0; t < s->p->num_taps; t++) {
        if (s->p->taps[t] != boundary) continue;
        EACH(r, s->w->rows) {
            float *to = s->p->features + ((long)r * s->p->num_taps + t) * m->hidden;
            normalise(s->hidden + (long)r * m->hidden, norm, m->eps, m->hidden, to);
        }
        fd_barrier(team);
    }
}

/* The residual stream before the first layer. */
static void begin(stack *s, fd_team *team) {
    const fd_model *m = s->m;
    int rows = s->w->rows;
    if (m->front == FD_JOINED) {
        EACH(r, rows) read_pair(s, &m->join, NULL, NULL, r);
        fd_barrier(team);
        sink to_hidden = {SINK_STORE, 0, m->join.n, s->hidden, m->hidden, m->join.bias, 1.0f};
        product(team, &m->join, s->input, rows, &to_hidden);
    } else {
        const float *norm = m->norm_before_residual ? m->input_norm : NULL;
        EACH(r, rows) {
            float *h = s->hidden + (long)r * m->hidden;
            if (m->front == FD_EMBEDDED) embed(s, r, h);
            else normalise(s->p->inputs + (long)r * m->hidden, norm, m->eps, m->hidden, h);
        }
    }
    fd_barrier(team);
}

static void mix(stack *s, fd_team *team, int layer, char *scores) {
    const fd_model *m = s->m;
    const fd_layer *l = m->layer + layer;
    int rows = s->w->rows, heads = m->heads + 2 * m->kv_heads;
    long width = (long)m->heads * m->head_dim;
    int is_paired = m->front == FD_PAIRED && layer == 0;
    EACH(r, rows) {
        if (is_paired) read_pair(s, &l->qkv, l->attention_norm, m->input_norm, r);
        else read_hidden(s, &l->qkv, l->attention_norm, r, r);
    }
    fd_barrier(team);
    sink to_qkv = {SINK_STORE, 0, l->qkv.n, s->qkv, qkv_width(m), l->qkv.bias, 1.0f};
    product(team, &l->qkv, s->input, rows, &to_qkv);
    fd_barrier(team);
    EACH(i, rows * heads) place(s, layer, i / heads, i % heads);
    fd_barrier(team);
    /* one work item alone reads this query, so it writes its result over it */
    fd_attention a = {s->mixed, s->p->keys[layer], s->p->values[layer], s->mixed, m->heads, m->kv_heads, m->head_dim,
                      m->has_bf16_kv, l->sliding, m->scale, m->softcap};
    EACH(i, rows * m->kv_heads) attend(&a, s->w, i / m->kv_heads, i % m->kv_heads, scores);
    fd_barrier(team);
    EACH(r, rows) prepare(&l->out, s->mixed + r * width, s->input + r * row_bytes(&l->out));
    fd_barrier(team);
    sink to_hidden = {SINK_ADD, 0, l->out.n, s->hidden, m->hidden, l->out.bias, m->residual_scale};
    product(team, &l->out, s->input, rows, &to_hidden);
    fd_barrier(team);
}

static void transform(stack *s, fd_team *team, const fd_layer *l, int activation, float scale) {
    const fd_model *m = s->m;
    int rows = s->w->rows;
    EACH(r, rows) read_hidden(s, &l->gate_up, l->mlp_norm, r, r);
    fd_barrier(team);
    sink to_inner = {SINK_GATE, activation, l->gate_up.n, s->inner, m->inner, l->gate_up.bias, 1.0f};
    product(team, &l->gate_up, s->input, rows, &to_inner);
    fd_barrier(team);
    EACH(r, rows) prepare(&l->down, s->inner + (long)r * m->inner, s->input + r * row_bytes(&l->down));
    fd_barrier(team);
    sink to_hidden = {SINK_ADD, 0, l->down.n, s->hidden, m->hidden, l->down.bias, scale};
    product(team, &l->down, s->input, rows, &to_hidden);
    fd_barrier(team);
}

static void stack_body(void *what, fd_team *team) {
    stack *s = what;
    const fd_model *m = s->m;
    int me = atomic_fetch_add(&s->members, 1);
    char *scores = s->scores + me * attention_scratch(s->w, m->heads / m->kv_heads);
    begin(s, team);
    tap(s, team, 0);
    for (int i = 0; i < m->layers; i++) {
        mix(s, team, i, scores);
        transform(s, team, m->layer + i, m->activation, m->residual_scale);
        tap(s, team, i + 1);
    }
    if (m->adapter) transform(s, team, m->adapter, FD_SILU, 1.0f);
    tap(s, team, FD_NORMED);
    EACH(r, s->w->num_logits) read_hidden(s, &m->head, m->norm, s->w->logit_rows[r], r);
    fd_barrier(team);
    sink to_logits = {SINK_STORE, 0, m->head.n, s->p->logits, m->head.n, m->head.bias, m->logit_scale};
    product(team, &m->head, s->input, s->w->num_logits, &to_logits);
}

static void forward(const fd_model *m, const fd_window *w, const fd_pass *p) {
    stack s = {.m = m, .w = w, .p = p};
    lay_out(&s);
    fd_parallel(stack_body, &s);
}

#endif
