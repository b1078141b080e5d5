/* A forward pass of an encoder-decoder model's decoder; stack.h is the version for decoder-only models.
 *
 * A layer has self-attention, cross-attention and an MLP. Norms are before each of the three, or after each of them; in
 * that case the next part reads the normed stream. The caller embeds the rows and computes the source's keys and
 * values. A row finds those of its request through a separate window.
 */
#ifndef FD_PAIR_H
#define FD_PAIR_H

#include <math.h>

#include "attention.h"
#include "foredraft.h"
#include "linear.h"
#include "stack.h"

typedef struct {
    const fd_pair *m;
    const fd_window *w, *sources;
    const fd_pair_pass *p;
    char *input;
    float *hidden, *qkv, *mixed, *inner;
    char *scores;
    atomic_int members;
} pair;

INLINE long pair_row(const fd_pair *m) {
    long bytes = m->is_encoder ? 0 : row_bytes(&m->head);
    for (int i = 0; i < m->layers; i++) {
        const fd_pair_layer *l = m->layer + i; /* an encoder's layers have zeros for cross-attention */
        bytes = most(bytes, most(most(row_bytes(&l->qkv), row_bytes(&l->out)), row_bytes(&l->query)));
        bytes = most(bytes, most(most(row_bytes(&l->cross_out), row_bytes(&l->wide)), row_bytes(&l->narrow)));
    }
    return bytes;
}

INLINE long pair_scores(const fd_window *w, const fd_window *sources) {
    return most(attention_scratch(w, 1), attention_scratch(sources, 1));
}

static int64_t pair_scratch(const fd_pair *m, const fd_window *w, const fd_window *sources, int threads) {
    long row = pair_row(m) + 4 * ((long)m->hidden + 4 * (long)m->heads * m->head_dim + m->inner);
    return row * w->rows + threads * pair_scores(w, sources) + 6 * 64;
}

static void pair_lay_out(pair *s) {
    const fd_pair *m = s->m;
    long rows = s->w->rows, width = (long)m->heads * m->head_dim;
    s->input = align(s->p->scratch);
    s->hidden = (float *)align(s->input + rows * pair_row(m));
    s->qkv = (float *)align((char *)(s->hidden + rows * m->hidden));
    s->mixed = (float *)align((char *)(s->qkv + rows * 3 * width));
    s->inner = (float *)align((char *)(s->mixed + rows * width));
    s->scores = align((char *)(s->inner + rows * m->inner));
}

/* With a shift: y = (x - mean) / deviation * weight + shift. Without: as `normalise`. x and y may be equal. */
static void pair_norm(const fd_norm *norm, const float *x, float eps, int n, float *y) {
    if (!norm->shift) {
        normalise(x, norm->weight, eps, n, y);
        return;
    }
    vf total = {0}, squares = {0};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) total += load(x + i);
    for (; i < n; i++) rest += x[i];
    float mean = (sum(total) + rest) / (float)n;
    rest = 0;
    for (i = 0; i + LANES <= n; i += LANES) {
        vf d = load(x + i) - mean;
        squares = multiply_add(d, d, squares);
    }
    for (; i < n; i++) rest = multiply_add_one(x[i] - mean, x[i] - mean, rest);
    float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES)
        store(y + i, multiply_add((load(x + i) - mean) * scale, load(norm->weight + i), load(norm->shift + i)));
    for (; i < n; i++) y[i] = multiply_add_one((x[i] - mean) * scale, norm->weight[i], norm->shift[i]);
}

/* Converts a row of the stream to row `to` of the input of `of`. `before` is the norm before this part. `after` is the
 * norm after the previous part, not yet applied to the stream. Either may be NULL. */
static void pair_read(const pair *s, const fd_weight *of, const fd_norm *before, const fd_norm *after, int row, int to) {
    const fd_pair *m = s->m;
    float *h = s->hidden + (long)row * m->hidden;
    char *input = s->input + to * row_bytes(of);
    if (after) pair_norm(after, h, m->eps, m->hidden, h);
    if (!before) {
        prepare(of, h, input);
        return;
    }
    float room[m->hidden];
    pair_norm(before, h, m->eps, m->hidden, room);
    prepare(of, room, input);
}

static void pair_add(pair *s, fd_team *team, const fd_weight *of, const float *from, long width) {
    int rows = s->w->rows;
    EACH(r, rows) prepare(of, from + r * width, s->input + r * row_bytes(of));
    fd_barrier(team);
    sink to_hidden = {SINK_ADD, 0, of->n, s->hidden, s->m->hidden, of->bias, 1.0f};
    product(team, of, s->input, rows, &to_hidden);
    fd_barrier(team);
}

static void pair_own(pair *s, fd_team *team, int layer, const fd_norm *after, char *scores) {
    const fd_pair *m = s->m;
    const fd_pair_layer *l = m->layer + layer;
    int rows = s->w->rows;
    long width = (long)m->heads * m->head_dim;
    EACH(r, rows) pair_read(s, &l->qkv, m->norms_after ? NULL : &l->own_norm, after, r, r);
    fd_barrier(team);
    sink to_qkv = {SINK_STORE, 0, l->qkv.n, s->qkv, 3 * width, l->qkv.bias, 1.0f};
    product(team, &l->qkv, s->input, rows, &to_qkv);
    fd_barrier(team);
    EACH(r, rows) {
        const float *x = s->qkv + r * 3 * width;
        long slot = s->w->write[r];
        memcpy(s->mixed + r * width, x, (size_t)width * 4);
        keep(s->p->keys[layer], slot * width, x + width, (int)width, m->has_bf16_kv);
        keep(s->p->values[layer], slot * width, x + 2 * width, (int)width, m->has_bf16_kv);
    }
    fd_barrier(team);
    fd_attention a = {.query = s->mixed, .keys = s->p->keys[layer], .values = s->p->values[layer], .out = s->mixed,
                      .heads = m->heads, .kv_heads = m->heads, .head_dim = m->head_dim, .has_bf16_kv = m->has_bf16_kv,
                      .scale = m->scale, .bias = l->bias, .far = m->far, .places = m->is_encoder ? s->w : NULL};
    const fd_window *seen = m->is_encoder ? s->sources : s->w;
    EACH(i, rows * m->heads) attend(&a, seen, i / m->heads, i % m->heads, scores);
    fd_barrier(team);
    pair_add(s, team, &l->out, s->mixed, width);
}

static void pair_cross(pair *s, fd_team *team, int layer, const fd_norm *after, char *scores) {
    const fd_pair *m = s->m;
    const fd_pair_layer *l = m->layer + layer;
    int rows = s->w->rows;
    long width = (long)m->heads * m->head_dim;
    EACH(r, rows) pair_read(s, &l->query, m->norms_after ? NULL : &l->cross_norm, after, r, r);
    fd_barrier(team);
    sink to_mixed = {SINK_STORE, 0, l->query.n, s->mixed, width, l->query.bias, 1.0f};
    product(team, &l->query, s->input, rows, &to_mixed);
    fd_barrier(team);
    fd_attention a = {.query = s->mixed, .keys = s->p->cross_keys[layer], .values = s->p->cross_values[layer],
                      .out = s->mixed, .heads = m->heads, .kv_heads = m->heads, .head_dim = m->head_dim,
                      .has_bf16_kv = m->has_bf16_kv, .scale = m->scale};
    EACH(i, rows * m->heads) attend(&a, s->sources, i / m->heads, i % m->heads, scores);
    fd_barrier(team);
    pair_add(s, team, &l->cross_out, s->mixed, width);
}

static void pair_activate(int kind, float *x, int n) {
    if (kind == FD_RELU) {
        for (int i = 0; i < n; i++) x[i] = x[i] > 0 ? x[i] : 0;
    } else if (kind == FD_GELU) {
        for (int i = 0; i < n; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    } else {
        int i = 0;
        for (; i + LANES <= n; i += LANES) store(x + i, activate(kind, load(x + i)));
        if (i == n) return;
        float last[LANES] = {0};
        memcpy(last, x + i, (size_t)(n - i) * 4);
        store(last, activate(kind, load(last)));
        memcpy(x + i, last, (size_t)(n - i) * 4);
    }
}

static void pair_transform(pair *s, fd_team *team, int layer, const fd_norm *after) {
    const fd_pair *m = s->m;
    const fd_pair_layer *l = m->layer + layer;
    int rows = s->w->rows;
    EACH(r, rows) pair_read(s, &l->wide, m->norms_after ? NULL : &l->inner_norm, after, r, r);
    fd_barrier(team);
    sink to_inner = {m->is_gated ? SINK_GATE : SINK_STORE, m->activation, l->wide.n, s->inner, m->inner, l->wide.bias,
                     1.0f};
    product(team, &l->wide, s->input, rows, &to_inner);
    fd_barrier(team);
    if (!m->is_gated) {
        EACH(r, rows) pair_activate(m->activation, s->inner + (long)r * m->inner, m->inner);
        fd_barrier(team);
    }
    pair_add(s, team, &l->narrow, s->inner, m->inner);
}

/* Copies the stream, normed if `norm` is set, to every tap of this layer boundary. */
static void pair_tap(pair *s, fd_team *team, int boundary, const fd_norm *norm) {
    const fd_pair *m = s->m;
    for (int t = 0; t < s->p->num_taps; t++) {
        if (s->p->taps[t] != boundary) continue;
        EACH(r, s->w->rows) {
            float *to = s->p->features + ((long)r * s->p->num_taps + t) * m->hidden;
            const float *h = s->hidden + (long)r * m->hidden;
            if (norm) pair_norm(norm, h, m->eps, m->hidden, to);
            else memcpy(to, h, (size_t)m->hidden * 4);
        }
        fd_barrier(team);
    }
}

static void pair_body(void *what, fd_team *team) {
    pair *s = what;
    const fd_pair *m = s->m;
    int me = atomic_fetch_add(&s->members, 1);
    char *scores = s->scores + me * pair_scores(s->w, s->sources);
    EACH(r, s->w->rows)
        memcpy(s->hidden + (long)r * m->hidden, s->p->inputs + (long)r * m->hidden, (size_t)m->hidden * 4);
    fd_barrier(team);
    pair_tap(s, team, 0, NULL);
    const fd_norm *after = NULL;
    for (int i = 0; i < m->layers; i++) {
        const fd_pair_layer *l = m->layer + i;
        pair_own(s, team, i, after, scores);
        if (!m->is_encoder) pair_cross(s, team, i, m->norms_after ? &l->own_norm : NULL, scores);
        pair_transform(s, team, i, !m->norms_after ? NULL : m->is_encoder ? &l->own_norm : &l->cross_norm);
        after = m->norms_after ? &l->inner_norm : NULL;
        pair_tap(s, team, i + 1, after);
    }
    if (after && m->norm.weight) {
        EACH(r, s->w->rows) pair_norm(after, s->hidden + (long)r * m->hidden, m->eps, m->hidden,
                                      s->hidden + (long)r * m->hidden);
        fd_barrier(team);
        after = NULL;
    }
    const fd_norm *last = m->norm.weight ? &m->norm : after;
    pair_tap(s, team, FD_NORMED, last);
    if (m->is_encoder) return;
    EACH(i, s->w->num_logits) pair_read(s, &m->head, last, NULL, s->w->logit_rows[i], i);
    fd_barrier(team);
    sink to_logits = {SINK_STORE, 0, m->head.n, s->p->logits, m->head.n, m->head.bias, m->logit_scale};
    product(team, &m->head, s->input, s->w->num_logits, &to_logits);
}

static void pair_forward(const fd_pair *m, const fd_window *w, const fd_window *sources, const fd_pair_pass *p) {
    pair s = {.m = m, .w = w, .sources = sources, .p = p};
    pair_lay_out(&s);
    fd_parallel(pair_body, &s);
}

#endif
