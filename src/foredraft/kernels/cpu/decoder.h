/* What the decoders of both kinds of models have in common: scratch memory and the parts of a layer. decoder_only.h and
 * encdec.h put the parts in order.
 *
 * The team enters a forward pass once and synchronises at barriers. Every function with a `team` ends with a barrier,
 * except compute_logits. The residual stream is float32 from the embeddings to the logits; only the inputs of products
 * are rounded.
 */
#ifndef FD_DECODER_H
#define FD_DECODER_H

#include "activation.h"
#include "attention.h"
#include "foredraft.h"
#include "kv.h"
#include "linear.h"
#include "low_rank.h"
#include "norm.h"
#include "simd.h"
#include "team.h"

#define CAP_CHUNK 4096 /* logits that a member caps at a time */
enum { ROW_LISTS = 5 }; /* lists that describe the rows that narrow.h keeps */

INLINE char *align(char *p) { return (char *)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

typedef struct {
    int hidden, heads, kv_heads, head_dim, inner, kv_kind, has_branch;
    int gate_width;               /* outputs of qkv after keys and values */
    int mixer_width, mixer_inner; /* largest row of a projection of a recurrent layer, and of its result */
    float eps;
    long input_bytes; /* largest row of an input of a product */
    long score_bytes; /* attention's scratch memory per member */
    long expert_bytes; /* buffers of experts, of all rows */
} decoder_shape;

/* State of one forward pass. Buffers are [num_rows, ...]. */
typedef struct {
    decoder_shape shape;
    const fd_rows *rows;
    const fd_pass *pass;
    char *input;      /* input of the next product, in the format of its weight */
    float *hidden;    /* residual stream */
    float *qkv;       /* queries, keys and values, or the projected rows of a recurrent layer; later a branch,
                       * [num_rows, hidden], before it is added */
    float *attention; /* queries, then the outputs of attention; or those of a recurrent layer */
    float *inner;     /* inner states of the MLP */
    char *experts;    /* buffers of experts */
    int32_t *lists;   /* of the rows that narrow.h keeps, [ROW_LISTS, num_rows] */
    const int32_t *kept_rows; /* [rows->num_rows] their rows in the pass; NULL = all rows are kept */
    char *scores;     /* [members, score_bytes] */
    atomic_int num_members;
} decoder;

INLINE long attention_width(const decoder_shape *s) { return (long)s->heads * s->head_dim; }
INLINE long qkv_width(const decoder_shape *s) { return (long)(s->heads + 2 * s->kv_heads) * s->head_dim + s->gate_width; }
INLINE long qkv_room(const decoder_shape *s) {
    return max_long(max_long(qkv_width(s), s->mixer_width), s->has_branch ? s->hidden : 0);
}
/* Results of an MLP's first product, as floats or as inputs of the second one. */
INLINE long inner_room(const decoder_shape *s) { return max_long(s->inner, rounded_bytes(s->inner) / 4); }
INLINE long attention_room(const decoder_shape *s) { return max_long(attention_width(s), s->mixer_inner); }
INLINE float *hidden_row(const decoder *d, int row) { return d->hidden + (long)row * d->shape.hidden; }

static int64_t decoder_scratch(const decoder_shape *s, const fd_rows *rows, int threads) {
    long row = s->input_bytes + 4 * ((long)s->hidden + qkv_room(s) + attention_room(s) + inner_room(s));
    return (row + 4 * ROW_LISTS) * rows->num_rows + s->expert_bytes + threads * s->score_bytes + 8 * 64;
}

static void set_buffers(decoder *d) {
    const decoder_shape *s = &d->shape;
    long rows = d->rows->num_rows;
    d->input = align(d->pass->scratch);
    d->hidden = (float *)align(d->input + rows * s->input_bytes);
    d->qkv = (float *)align((char *)(d->hidden + rows * s->hidden));
    d->attention = (float *)align((char *)(d->qkv + rows * qkv_room(s)));
    d->inner = (float *)align((char *)(d->attention + rows * attention_room(s)));
    d->experts = align((char *)(d->inner + rows * inner_room(s)));
    d->lists = (int32_t *)align(d->experts + s->expert_bytes);
    d->scores = align((char *)(d->lists + ROW_LISTS * rows));
}

/* Returns the scratch memory of the calling member. */
static char *take_scores(decoder *d) { return d->scores + atomic_fetch_add(&d->num_members, 1) * d->shape.score_bytes; }

INLINE epilogue store_to(const fd_weight *w, float *out, long stride, float scale) {
    return (epilogue){.mode = EPILOGUE_STORE, .n = w->n, .out = out, .stride = stride, .bias = w->bias, .scale = scale};
}

/* Converts a row of the residual stream to an input of `w`. `pre_norm` is the norm before this part. `post_norm` is the
 * norm after the previous part, not yet applied to the stream. Either may be without a weight. */
static void convert_hidden(const decoder *d, const fd_weight *w, fd_norm pre_norm, fd_norm post_norm, int row,
                           char *input) {
    const decoder_shape *s = &d->shape;
    float *h = hidden_row(d, row);
    if (post_norm.weight) apply_norm(post_norm, h, s->eps, s->hidden, h);
    if (!pre_norm.weight) {
        convert_row(w, h, input);
        return;
    }
    float normed[s->hidden];
    apply_norm(pre_norm, h, s->eps, s->hidden, normed);
    convert_row(w, normed, input);
}

/* Converts a row of the residual stream to row `to` of the input of `w`. */
static void read_hidden(const decoder *d, const fd_weight *w, fd_norm pre_norm, fd_norm post_norm, int row, int to) {
    convert_hidden(d, w, pre_norm, post_norm, row, d->input + to * row_bytes(w));
}

/* Converts the whole residual stream, and what the adapters of `c` read of it. With adapters, there is no `post_norm`. */
static void read_all_hidden(decoder *d, fd_team *team, const fd_weight *w, fd_norm pre_norm, fd_norm post_norm,
                            const change *c) {
    int rows = d->rows->num_rows;
    FOR_EACH_ITEM(i, rows + count_places(c)) {
        if (i < rows) read_hidden(d, w, pre_norm, post_norm, i, i);
        else convert_hidden(d, &find_low_rank(c, i - rows)->a, pre_norm, NO_NORM, c->rows->row[i - rows],
                            find_input(c, i - rows));
    }
    fd_barrier(team);
    multiply_places(team, c);
}

static void project(decoder *d, fd_team *team, const fd_weight *w, epilogue e) {
    matmul(team, w, d->input, d->rows->num_rows, &e);
    fd_barrier(team);
}

/* Whether results can be written as inputs of `w` at once: a bf16 input needs no more of its row than the number itself. */
INLINE int is_converted_singly(const fd_weight *w, const change *c) { return w->kind == FD_BF16 && w->k % 2 == 0 && !c->rows; }

/* Projects x, [num_rows, width]. */
static void project_rows(decoder *d, fd_team *team, const fd_weight *w, const float *x, long width, epilogue e) {
    int rows = d->rows->num_rows;
    const change *c = &e.added;
    FOR_EACH_ITEM(i, rows + count_places(c)) {
        if (i < rows) convert_row(w, x + i * width, d->input + i * row_bytes(w));
        else convert_row(&find_low_rank(c, i - rows)->a, x + c->rows->row[i - rows] * width, find_input(c, i - rows));
    }
    fd_barrier(team);
    multiply_places(team, c);
    project(d, team, w, e);
}

/* Adds scale * (x W^T + bias) to the residual stream. */
INLINE epilogue add_to_residual(const decoder *d, const fd_weight *w, float scale) {
    epilogue to_hidden = store_to(w, d->hidden, d->shape.hidden, scale);
    to_hidden.mode = EPILOGUE_ADD;
    return to_hidden;
}

/* Keeps the result apart until `add_branch`. */
INLINE epilogue store_branch(const decoder *d, const fd_weight *w) { return store_to(w, d->qkv, d->shape.hidden, 1.0f); }

/* Adds the branch, normed, to the residual stream. */
static void add_branch(decoder *d, fd_team *team, fd_norm norm) {
    int n = d->shape.hidden;
    FOR_EACH_ITEM(r, d->rows->num_rows) {
        float *h = hidden_row(d, r), *branch = d->qkv + (long)r * n;
        apply_norm(norm, branch, d->shape.eps, n, branch);
        for (int i = 0; i < n; i++) h[i] += branch[i];
    }
    fd_barrier(team);
}

/* Writes one head of one row of `qkv`: a query to `attention`, a key or value to the row's slot. */
static void store_head(const decoder *d, int layer, int row, int head) {
    const decoder_shape *s = &d->shape;
    const float *x = d->qkv + row * qkv_width(s) + (long)head * s->head_dim;
    int kv_head = head - s->heads, is_value = kv_head >= s->kv_heads;
    if (kv_head < 0) {
        memcpy(d->attention + row * attention_width(s) + (long)head * s->head_dim, x, (size_t)s->head_dim * 4);
        return;
    }
    void *pool = is_value ? d->pass->values[layer] : d->pass->keys[layer];
    store_head_kv(pool, s->kv_kind, d->rows->write_slots[row], s->kv_heads, s->head_dim,
                  kv_head - is_value * s->kv_heads, x);
}

/* Arguments of attention over these keys and values. Only one work item reads a query, so the result replaces it. */
static fd_attention attention_over(const decoder *d, const void *keys, const void *values, float scale) {
    const decoder_shape *s = &d->shape;
    return (fd_attention){.query = d->attention, .keys = keys, .values = values, .out = d->attention,
                          .heads = s->heads, .kv_heads = s->kv_heads, .head_dim = s->head_dim,
                          .kv_kind = s->kv_kind, .scale = scale};
}

/* Multiplies the results of attention by the sigmoids of the last outputs of qkv. */
static void gate_attention(const decoder *d, fd_team *team) {
    long width = attention_width(&d->shape), qkv = qkv_width(&d->shape);
    FOR_EACH_ITEM(r, d->rows->num_rows) {
        float *x = d->attention + r * width;
        const float *gate = d->qkv + (r + 1) * qkv - width;
        for (long i = 0; i < width; i += LANES) store(x + i, load(x + i) * vsigmoid(load(gate + i)));
    }
    fd_barrier(team);
}

/* Attention of every row over the keys of `visible`, then its gate if it has one, and the output projection. */
static void attend_and_project(decoder *d, fd_team *team, const fd_attention *a, const fd_rows *visible, char *scores,
                               const fd_weight *out, epilogue e) {
    int is_direct = is_converted_singly(out, &e.added) && !d->shape.gate_width;
    rounded_rows to = {.data = is_direct ? (rounded *)d->input : NULL, .stride = row_bytes(out) / (long)sizeof(rounded)};
    attend_rows(a, visible, team, scores, to);
    fd_barrier(team);
    if (is_direct) {
        project(d, team, out, e);
        return;
    }
    if (d->shape.gate_width) gate_attention(d, team);
    project_rows(d, team, out, d->attention, attention_width(&d->shape), e);
}

typedef struct {
    const fd_weight *in, *out; /* `in` has gate and up interleaved if gated */
    int is_gated, activation;
    change added; /* to the product with `in` */
} mlp;

static void mlp_block(decoder *d, fd_team *team, mlp m, fd_norm pre_norm, fd_norm post_norm, epilogue e) {
    int inner = d->shape.inner;
    read_all_hidden(d, team, m.in, pre_norm, post_norm, &m.added);
    epilogue to_inner = store_to(m.in, d->inner, inner, 1.0f);
    to_inner.added = m.added;
    to_inner.mode = m.is_gated ? EPILOGUE_GATE : EPILOGUE_STORE;
    to_inner.activation = m.activation;
    int fits = m.out->k == inner && row_bytes(m.out) <= 4 * inner_room(&d->shape);
    if (m.is_gated && fits && is_converted_singly(m.out, &e.added)) {
        to_inner.is_rounded = 1;
        to_inner.stride = row_bytes(m.out) / (long)sizeof(rounded);
        project(d, team, m.in, to_inner);
        matmul(team, m.out, (const char *)d->inner, d->rows->num_rows, &e);
        fd_barrier(team);
        return;
    }
    project(d, team, m.in, to_inner);
    if (!m.is_gated) {
        FOR_EACH_ITEM(r, d->rows->num_rows) activate_row(m.activation, d->inner + (long)r * inner, inner);
        fd_barrier(team);
    }
    project_rows(d, team, m.out, d->inner, inner, e);
}

/* Copies the residual stream, normed, to the features if this layer boundary is among the requested hidden layers. */
static void return_hidden_layer(decoder *d, fd_team *team, int boundary, fd_norm norm) {
    const decoder_shape *s = &d->shape;
    const fd_pass *p = d->pass;
    const int32_t *kept = d->kept_rows;
    for (int i = 0; i < p->hidden_layer_count; i++) {
        if (p->hidden_layers[i] != boundary) continue;
        FOR_EACH_ITEM(r, d->rows->num_rows) {
            long at = ((long)(kept ? kept[r] : r) * p->hidden_layer_count + i) * s->hidden;
            if (!p->has_bf16_features) {
                apply_norm(norm, hidden_row(d, r), s->eps, s->hidden, (float *)p->features + at);
                continue;
            }
            float normed[s->hidden];
            apply_norm(norm, hidden_row(d, r), s->eps, s->hidden, normed);
            convert_to_bf16(normed, s->hidden, (uint16_t *)p->features + at);
        }
        fd_barrier(team);
    }
}

static void compute_logits(decoder *d, fd_team *team, const fd_weight *head, fd_norm norm, float scale) {
    int num_logits = d->rows->num_logits;
    FOR_EACH_ITEM(i, num_logits) read_hidden(d, head, norm, NO_NORM, d->rows->logit_rows[i], i);
    fd_barrier(team);
    epilogue to_logits = store_to(head, d->pass->logits, head->n, scale);
    matmul(team, head, d->input, num_logits, &to_logits);
}

/* Replaces logits x by cap * tanh(x / cap). */
static void cap_logits(decoder *d, fd_team *team, int vocab, float cap) {
    long size = (long)d->rows->num_logits * vocab;
    float *x = d->pass->logits;
    fd_barrier(team);
    FOR_EACH_ITEM(c, (size + CAP_CHUNK - 1) / CAP_CHUNK) {
        long end = (c + 1l) * CAP_CHUNK < size ? (c + 1l) * CAP_CHUNK : size;
        for (long i = (long)c * CAP_CHUNK; i < end; i++) x[i] = cap * tanhf(x[i] / cap);
    }
}

#endif
