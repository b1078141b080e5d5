/* A forward pass of a decoder-only model, or of a drafter's decoder layers. A layer has self-attention and a gated MLP
 * or experts. Each has a norm before it, after it or both, and both may read the same states.
 */
#ifndef FD_DECODER_ONLY_H
#define FD_DECODER_ONLY_H

#include "decoder.h"
#include "experts.h"
#include "narrow.h"
#include "recurrent.h"

typedef struct {
    const fd_model *model;
    decoder d;
    fd_rows narrowed; /* rows of the last layer after its keys and values, if not all go on */
} decoder_only;

/* Largest row of an input of the layer's MLP, or of its router. */
INLINE long mlp_input_bytes(const fd_layer *l) {
    long of_mlp = max_long(row_bytes(&l->gate_up), row_bytes(&l->down));
    return l->experts ? max_long(of_mlp, row_bytes(&l->experts->router)) : of_mlp;
}

/* Whether the output of this layer's attention is added to the residual stream in a step of its own. */
INLINE int is_attention_apart(const fd_model *m, const fd_layer *l) { return m->is_parallel || l->attention_post_norm; }

INLINE int has_shared_mlp(const fd_layer *l) { return l->experts && l->gate_up.n; }

static int has_branches(const fd_model *m) {
    for (int i = 0; i < m->layers; i++)
        if (is_attention_apart(m, m->layer + i) || m->layer[i].mlp_post_norm || has_shared_mlp(m->layer + i)) return 1;
    return 0;
}

static decoder_shape decoder_only_shape(const fd_model *m, const fd_rows *rows) {
    long bytes = max_long(row_bytes(&m->head), row_bytes(&m->fc));
    if (m->adapter) bytes = max_long(bytes, mlp_input_bytes(m->adapter));
    long experts = 0;
    int mixer_width = 0, mixer_inner = 0;
    for (int i = 0; i < m->layers; i++) {
        const fd_layer *l = m->layer + i;
        bytes = max_long(bytes, max_long(max_long(row_bytes(&l->qkv), row_bytes(&l->out)), mlp_input_bytes(l)));
        if (l->experts) experts = max_long(experts, expert_bytes(l->experts, rows->num_rows));
        if (!l->mixer) continue;
        bytes = max_long(bytes, max_long(row_bytes(&l->mixer->input), row_bytes(&l->mixer->out)));
        bytes = max_long(bytes, row_bytes(&l->mixer->steps));
        mixer_width = max_long(mixer_width, l->mixer->width);
        mixer_inner = max_long(mixer_inner, l->mixer->inner);
    }
    return (decoder_shape){.hidden = m->hidden, .heads = m->heads, .kv_heads = m->kv_heads, .head_dim = m->head_dim,
                           .inner = m->inner, .kv_kind = m->kv_kind, .has_branch = has_branches(m),
                           .gate_width = m->has_attention_gate ? m->heads * m->head_dim : 0,
                           .mixer_width = mixer_width, .mixer_inner = mixer_inner,
                           .eps = m->eps, .input_bytes = bytes, .expert_bytes = experts,
                           .score_bytes = attention_scratch(rows, m->heads / m->kv_heads)};
}

static int64_t decoder_only_scratch(const fd_model *m, const fd_rows *rows, int threads) {
    decoder_shape shape = decoder_only_shape(m, rows);
    return decoder_scratch(&shape, rows, threads);
}

INLINE fd_norm rms_norm_of(const float *weight) { return (fd_norm){.weight = weight}; }
INLINE fd_norm norm_of(const fd_model *m, const float *weight) {
    return (fd_norm){.weight = weight, .bias = weight ? m->norm_bias : NULL};
}

/* Rotary position embedding in place; it rotates the two halves of the first `rotary` values. */
static void apply_rope(float *x, const float *cos, const float *sin, int rotary) {
    int half = rotary / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, multiply_add(a, c, -(b * s)));
        store(x + half + i, multiply_add(b, c, a * s));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = multiply_add_scalar(a, cos[i], -(b * sin[i]));
        x[half + i] = multiply_add_scalar(b, cos[i], a * sin[i]);
    }
}

INLINE const float *image_row(const fd_images *images, const float *states, int hidden, int row) {
    return images && images->index[row] >= 0 ? states + (long)images->index[row] * hidden : NULL;
}

static void embed(const decoder_only *o, int row, float *to) {
    const fd_model *m = o->model;
    const fd_images *images = o->d.pass->images;
    const float *state = images ? image_row(images, images->states, m->hidden, row) : NULL;
    if (state) {
        memcpy(to, state, sizeof(float) * m->hidden);
        return;
    }
    long at = (long)o->d.rows->tokens[row] * m->hidden;
    for (int i = 0; i < m->hidden; i++) {
        float x = m->has_bf16_embedding ? bf16_to_float(((const uint16_t *)m->embedding)[at + i])
                                        : ((const float *)m->embedding)[at + i];
        to[i] = x * m->embedding_scale;
    }
}

/* Concatenates a row's embedding and input, each normed if it has a norm, as a row of the input of `w`. */
static void read_embedding_and_input(const decoder_only *o, const fd_weight *w, const float *norm,
                                     const float *input_norm, int row) {
    const fd_model *m = o->model;
    const float *input = o->d.pass->inputs + (long)row * m->hidden;
    float buffer[2 * m->hidden];
    embed(o, row, buffer);
    rms_norm(buffer, norm, m->eps, m->hidden, buffer);
    rms_norm(input, input_norm, m->eps, m->hidden, buffer + m->hidden);
    convert_row(w, buffer, o->d.input + row * row_bytes(w));
}

/* The residual stream before the first layer. */
static void start_residual(decoder_only *o, fd_team *team) {
    const fd_model *m = o->model;
    decoder *d = &o->d;
    int rows = d->rows->num_rows;
    if (m->input_kind == FD_JOINED) {
        FOR_EACH_ITEM(r, rows) read_embedding_and_input(o, &m->fc, m->embedding_norm, m->input_norm, r);
        fd_barrier(team);
        project(d, team, &m->fc, store_to(&m->fc, d->hidden, m->hidden, 1.0f));
        return;
    }
    const float *norm = m->norm_before_residual ? m->input_norm : NULL;
    FOR_EACH_ITEM(r, rows) {
        if (m->input_kind == FD_EMBEDDED) embed(o, r, hidden_row(d, r));
        else rms_norm(d->pass->inputs + (long)r * m->hidden, norm, m->eps, m->hidden, hidden_row(d, r));
    }
    fd_barrier(team);
}

/* Norm, if the layer has one, and rotary embedding of one query head or key head of one row. */
static void norm_and_rotate_head(const decoder_only *o, const fd_layer *l, int row, int head) {
    const fd_model *m = o->model;
    const fd_rows *rows = o->d.rows;
    float *x = o->d.qkv + row * qkv_width(&o->d.shape) + (long)head * m->head_dim;
    const fd_images *images = o->d.pass->images;
    int place = count_keys(rows, row) - 1 - (images ? images->ahead[row] : 0);
    long first = (long)place * m->rotary / 2;
    if (!m->has_joint_head_norm) rms_norm(x, head < m->heads ? l->q_norm : l->k_norm, m->eps, m->head_dim, x);
    if (images && images->cos && l->positions == FD_ROTARY) {
        first = (long)row * m->rotary / 2;
        apply_rope(x, images->cos + first, images->sin + first, m->rotary);
        return;
    }
    if (l->positions == FD_ROTARY) apply_rope(x, m->cos + first, m->sin + first, m->rotary);
    if (l->positions == FD_LOCAL_ROTARY) apply_rope(x, m->local_cos + first, m->local_sin + first, m->rotary);
}

/* Norm of all query heads of every row together, and of all key heads. */
static void norm_joint_heads(const decoder_only *o, fd_team *team, const fd_layer *l) {
    const fd_model *m = o->model;
    FOR_EACH_ITEM(r, o->d.rows->num_rows) {
        float *query = o->d.qkv + r * qkv_width(&o->d.shape), *key = query + attention_width(&o->d.shape);
        rms_norm(query, l->q_norm, m->eps, m->heads * m->head_dim, query);
        rms_norm(key, l->k_norm, m->eps, m->kv_heads * m->head_dim, key);
    }
    fd_barrier(team);
}

/* Leaves out the rows that end at the last layer. */
static void narrow(decoder_only *o, fd_team *team, int layer) {
    decoder *d = &o->d;
    if (layer + 1 < o->model->layers || !can_narrow(d, o->model->layers)) return;
    fd_barrier(team); /* every member has read d->rows */
    FOR_EACH_ITEM(i, 1) {
        o->narrowed = narrow_rows(d);
        d->kept_rows = d->rows->logit_rows;
        d->rows = &o->narrowed;
    }
    fd_barrier(team);
}

static void attention_block(decoder_only *o, fd_team *team, int layer, char *scores) {
    const fd_model *m = o->model;
    const fd_layer *l = m->layer + layer;
    decoder *d = &o->d;
    int rows = d->rows->num_rows, heads = m->heads + 2 * m->kv_heads;
    epilogue to_qkv = store_to(&l->qkv, d->qkv, qkv_width(&d->shape), 1.0f);
    to_qkv.added = change_of(d->pass->adapted, layer, FD_QKV);
    if (m->input_kind == FD_PAIRED && layer == 0) { /* a drafter's, which has no adapters */
        FOR_EACH_ITEM(r, rows) read_embedding_and_input(o, &l->qkv, l->attention_norm, m->input_norm, r);
        fd_barrier(team);
    } else {
        read_all_hidden(d, team, &l->qkv, norm_of(m, l->attention_norm), NO_NORM, &to_qkv.added);
    }
    project(d, team, &l->qkv, to_qkv);
    if (m->has_joint_head_norm) norm_joint_heads(o, team, l);
    FOR_EACH_ITEM(i, rows * heads) {
        int row = i / heads, head = i % heads;
        if (head < m->heads + m->kv_heads) norm_and_rotate_head(o, l, row, head);
        store_head(d, layer, row, head);
    }
    fd_barrier(team);
    narrow(o, team, layer);
    fd_attention a = attention_over(d, d->pass->keys[layer], d->pass->values[layer], m->scale);
    a.sliding_window = l->sliding_window;
    a.softcap = m->softcap;
    a.sinks = l->sinks;
    if (d->pass->images) a.ahead = d->pass->images->ahead;
    epilogue e = is_attention_apart(m, l) ? store_branch(d, &l->out) : add_to_residual(d, &l->out, m->residual_scale);
    e.added = change_of(d->pass->adapted, layer, FD_OUT);
    attend_and_project(d, team, &a, d->rows, scores, &l->out, e);
    if (l->attention_post_norm) add_branch(d, team, norm_of(m, l->attention_post_norm));
}

/* The recurrent part of a layer, in place of attention. */
static void mixer_block(decoder_only *o, fd_team *team, int layer) {
    const fd_model *m = o->model;
    const fd_layer *l = m->layer + layer;
    const fd_mixer *x = l->mixer;
    decoder *d = &o->d;
    fd_norm norm = norm_of(m, l->attention_norm);
    read_all_hidden(d, team, &x->input, norm, NO_NORM, &NO_CHANGE);
    project(d, team, &x->input, store_to(&x->input, d->qkv, x->width, 1.0f));
    if (x->steps.n) {
        read_all_hidden(d, team, &x->steps, norm, NO_NORM, &NO_CHANGE);
        project(d, team, &x->steps, store_to(&x->steps, d->qkv + x->width - x->steps.n, x->width, 1.0f));
    }
    fd_mixing j = {.mixer = x, .runs = d->pass->runs, .projected = d->qkv, .out = d->attention,
                   .conv_states = d->pass->conv_states[layer], .states = d->pass->states[layer],
                   .num_rows = d->rows->num_rows};
    run_mixer(team, &j);
    project_rows(d, team, &x->out, d->attention, x->inner, add_to_residual(d, &x->out, m->residual_scale));
}

INLINE mlp gated_mlp(const fd_layer *l, int activation) {
    return (mlp){.in = &l->gate_up, .out = &l->down, .is_gated = 1, .activation = activation};
}

/* Multiplies a row of the branch by the sigmoid of the normed residual stream's product with the gate. */
static void gate_branch(const decoder *d, const float *gate, fd_norm norm, int row) {
    int n = d->shape.hidden;
    float normed[n], *branch = d->qkv + (long)row * n, product = 0;
    apply_norm(norm, hidden_row(d, row), d->shape.eps, n, normed);
    for (int i = 0; i < n; i++) product = multiply_add_scalar(normed[i], gate[i], product);
    float factor = 1.0f / (1.0f + expf(-product));
    for (int i = 0; i < n; i++) branch[i] *= factor;
}

/* Experts, and the shared MLP beside them: it is apart until the experts have read the residual stream. */
static void experts_block(decoder_only *o, fd_team *team, const fd_layer *l) {
    const fd_model *m = o->model;
    decoder *d = &o->d;
    fd_norm norm = norm_of(m, l->mlp_norm);
    if (has_shared_mlp(l)) {
        epilogue e = store_branch(d, &l->down);
        e.scale = m->residual_scale;
        mlp_block(d, team, gated_mlp(l, m->activation), norm, NO_NORM, e);
        if (l->shared_gate) {
            FOR_EACH_ITEM(r, d->rows->num_rows) gate_branch(d, l->shared_gate, norm, r);
            fd_barrier(team);
        }
    }
    expert_block(d, team, l->experts, norm, m->residual_scale);
    if (has_shared_mlp(l)) add_branch(d, team, NO_NORM);
}

static void gated_mlp_block(decoder_only *o, fd_team *team, int layer) {
    const fd_model *m = o->model;
    const fd_layer *l = m->layer + layer;
    decoder *d = &o->d;
    if (!d->rows->num_rows) return; /* no row goes on: `narrow` */
    if (l->experts) {
        experts_block(o, team, l);
        return;
    }
    epilogue e = l->mlp_post_norm ? store_branch(d, &l->down) : add_to_residual(d, &l->down, m->residual_scale);
    e.added = change_of(d->pass->adapted, layer, FD_DOWN);
    mlp block = gated_mlp(l, m->activation);
    block.added = change_of(d->pass->adapted, layer, FD_GATE_UP);
    mlp_block(d, team, block, norm_of(m, l->mlp_norm), NO_NORM, e);
    if (l->mlp_post_norm) add_branch(d, team, norm_of(m, l->mlp_post_norm));
    if (m->is_parallel) add_branch(d, team, NO_NORM); /* the attention's */
}

static void adapter_block(decoder_only *o, fd_team *team, const fd_layer *l) {
    epilogue e = add_to_residual(&o->d, &l->down, 1.0f);
    mlp_block(&o->d, team, gated_mlp(l, FD_SILU), rms_norm_of(l->mlp_norm), NO_NORM, e);
}

/* Adds the states of images that belong to the residual stream after a layer. */
static void add_image_states(decoder_only *o, fd_team *team, int layer) {
    decoder *d = &o->d;
    const fd_images *images = d->pass->images;
    int hidden = o->model->hidden;
    if (!images || layer >= images->num_added) return;
    FOR_EACH_ITEM(r, d->rows->num_rows) {
        const float *state = image_row(images, images->added[layer], hidden, r);
        float *to = hidden_row(d, r);
        for (int i = 0; state && i < hidden; i++) to[i] += state[i];
    }
    fd_barrier(team);
}

/* The part of one member in a pass. scores: its own scratch memory. */
static void run_decoder_only(decoder_only *o, fd_team *team, char *scores) {
    const fd_model *m = o->model;
    decoder *d = &o->d;
    start_residual(o, team);
    return_hidden_layer(d, team, 0, NO_NORM);
    for (int i = 0; i < m->layers; i++) {
        if (m->layer[i].mixer) mixer_block(o, team, i);
        else attention_block(o, team, i, scores);
        gated_mlp_block(o, team, i);
        add_image_states(o, team, i);
        return_hidden_layer(d, team, i + 1, NO_NORM);
    }
    if (m->adapter) adapter_block(o, team, m->adapter);
    return_hidden_layer(d, team, FD_AFTER_FINAL_NORM, norm_of(m, m->norm));
    compute_logits(d, team, &m->head, norm_of(m, m->norm), m->logit_scale);
    if (m->logit_softcap > 0) cap_logits(d, team, m->head.n, m->logit_softcap);
}

static void decoder_only_body(void *arg, fd_team *team) {
    decoder_only *o = arg;
    run_decoder_only(o, team, take_scores(&o->d));
}

static void decoder_only_forward(const fd_model *m, const fd_rows *rows, const fd_pass *pass) {
    decoder_only o = {.model = m, .d = {.shape = decoder_only_shape(m, rows), .rows = rows, .pass = pass}};
    set_buffers(&o.d);
    fd_parallel(decoder_only_body, &o);
}

#endif
