/* A forward pass of an encoder-decoder model's decoder, or of its encoder.
 *
 * A layer has self-attention, cross-attention and an MLP; an encoder's has no cross-attention. Norms are before each
 * part, or after each of them; in that case the next part reads the normed stream. The caller embeds the rows and
 * computes the source's keys and values. `sources` are the rows' views of the sources of their requests.
 */
#ifndef FD_ENCDEC_H
#define FD_ENCDEC_H

#include "decoder.h"

typedef struct {
    const fd_encdec *model;
    const fd_rows *sources;
    decoder d;
} encdec;

static decoder_shape encdec_shape(const fd_encdec *m, const fd_rows *rows, const fd_rows *sources) {
    long bytes = m->is_encoder ? 0 : row_bytes(&m->head);
    for (int i = 0; i < m->layers; i++) {
        const fd_encdec_layer *l = m->layer + i; /* an encoder's layers have zeros for cross-attention */
        bytes = max_long(bytes, max_long(row_bytes(&l->qkv), row_bytes(&l->self_out)));
        bytes = max_long(bytes, max_long(row_bytes(&l->cross_query), row_bytes(&l->cross_out)));
        bytes = max_long(bytes, max_long(row_bytes(&l->mlp_in), row_bytes(&l->mlp_out)));
    }
    return (decoder_shape){.hidden = m->hidden, .heads = m->heads, .kv_heads = m->heads, .head_dim = m->head_dim,
                           .inner = m->inner, .kv_kind = m->kv_kind, .eps = m->eps, .input_bytes = bytes,
                           .score_bytes = max_long(attention_scratch(rows, 1), attention_scratch(sources, 1))};
}

static int64_t encdec_scratch(const fd_encdec *m, const fd_rows *rows, const fd_rows *sources, int threads) {
    decoder_shape shape = encdec_shape(m, rows, sources);
    return decoder_scratch(&shape, rows, threads);
}

/* The norm before a part of a layer. */
INLINE fd_norm pre_norm_of(const fd_encdec *m, fd_norm norm) { return m->is_post_norm ? NO_NORM : norm; }
/* The norm after a part of a layer. */
INLINE fd_norm post_norm_of(const fd_encdec *m, fd_norm norm) { return m->is_post_norm ? norm : NO_NORM; }

static void self_attention_block(encdec *o, fd_team *team, int layer, fd_norm post_norm, char *scores) {
    const fd_encdec *m = o->model;
    const fd_encdec_layer *l = m->layer + layer;
    decoder *d = &o->d;
    read_all_hidden(d, team, &l->qkv, pre_norm_of(m, l->self_norm), post_norm, &NO_CHANGE);
    project(d, team, &l->qkv, store_to(&l->qkv, d->qkv, qkv_width(&d->shape), 1.0f));
    FOR_EACH_ITEM(r, d->rows->num_rows)
        for (int head = 0; head < 3 * m->heads; head++) store_head(d, layer, r, head);
    fd_barrier(team);
    fd_attention a = attention_over(d, d->pass->keys[layer], d->pass->values[layer], m->scale);
    a.bias = l->bias;
    a.max_distance = m->max_distance;
    a.query_rows = m->is_encoder ? d->rows : NULL;
    attend_and_project(d, team, &a, m->is_encoder ? o->sources : d->rows, scores, &l->self_out,
                       add_to_residual(d, &l->self_out, 1.0f));
}

static void cross_attention_block(encdec *o, fd_team *team, int layer, fd_norm post_norm, char *scores) {
    const fd_encdec *m = o->model;
    const fd_encdec_layer *l = m->layer + layer;
    decoder *d = &o->d;
    read_all_hidden(d, team, &l->cross_query, pre_norm_of(m, l->cross_norm), post_norm, &NO_CHANGE);
    project(d, team, &l->cross_query, store_to(&l->cross_query, d->attention, attention_width(&d->shape), 1.0f));
    fd_attention a = attention_over(d, d->pass->cross_keys[layer], d->pass->cross_values[layer], m->scale);
    attend_and_project(d, team, &a, o->sources, scores, &l->cross_out, add_to_residual(d, &l->cross_out, 1.0f));
}

/* Applies the last layer's post-norm to the stream, if the final norm follows. Returns the last norm to apply. */
static fd_norm finish_layers(encdec *o, fd_team *team, fd_norm post_norm) {
    const fd_encdec *m = o->model;
    if (!m->norm.weight) return post_norm;
    if (post_norm.weight) {
        FOR_EACH_ITEM(r, o->d.rows->num_rows)
            apply_norm(post_norm, hidden_row(&o->d, r), m->eps, m->hidden, hidden_row(&o->d, r));
        fd_barrier(team);
    }
    return m->norm;
}

static void encdec_body(void *arg, fd_team *team) {
    encdec *o = arg;
    const fd_encdec *m = o->model;
    decoder *d = &o->d;
    char *scores = take_scores(d);
    FOR_EACH_ITEM(r, d->rows->num_rows)
        memcpy(hidden_row(d, r), d->pass->inputs + (long)r * m->hidden, (size_t)m->hidden * 4);
    fd_barrier(team);
    return_hidden_layer(d, team, 0, NO_NORM);
    fd_norm post_norm = NO_NORM; /* of the part before, not yet applied to the stream */
    for (int i = 0; i < m->layers; i++) {
        const fd_encdec_layer *l = m->layer + i;
        self_attention_block(o, team, i, post_norm, scores);
        post_norm = post_norm_of(m, l->self_norm);
        if (!m->is_encoder) {
            cross_attention_block(o, team, i, post_norm, scores);
            post_norm = post_norm_of(m, l->cross_norm);
        }
        mlp weights = {.in = &l->mlp_in, .out = &l->mlp_out, .is_gated = m->is_gated, .activation = m->activation};
        mlp_block(d, team, weights, pre_norm_of(m, l->mlp_norm), post_norm,
                  add_to_residual(d, weights.out, 1.0f));
        post_norm = post_norm_of(m, l->mlp_norm);
        return_hidden_layer(d, team, i + 1, post_norm);
    }
    fd_norm last = finish_layers(o, team, post_norm);
    return_hidden_layer(d, team, FD_AFTER_FINAL_NORM, last);
    if (!m->is_encoder) compute_logits(d, team, &m->head, last, m->logit_scale);
}

static void encdec_forward(const fd_encdec *m, const fd_rows *rows, const fd_rows *sources, const fd_pass *pass) {
    encdec o = {.model = m, .sources = sources,
                .d = {.shape = encdec_shape(m, rows, sources), .rows = rows, .pass = pass}};
    set_buffers(&o.d);
    fd_parallel(encdec_body, &o);
}

#endif
