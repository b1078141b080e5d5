/* Chains of draft tokens: all passes of a draft network over a batch and the sampling between them, in one region of the
 * thread team. The passes are those of decoder_only.h and the samples those of sampler.h, with the same bits as in calls
 * of their own. */
#ifndef FD_CHAIN_H
#define FD_CHAIN_H

#include "decoder_only.h"
#include "draft_level.h"

/* Rows of the pass over the newest tokens. Row i belongs to draft growing[i] of the level. */
typedef struct {
    int32_t *token, *write_slot, *page_offset, *path_offset, *num_committed, *path_length, *logit_row;
} level_rows;

typedef struct {
    const fd_chain *chain;
    decoder_only o;
    fd_rows rows;
    fd_pass pass;
    level_rows row;
    draft_level level;
    float *logits, *features, *inputs; /* of the levels, [num_drafts, ..] */
    const float *last_features;        /* of the newest pass, by row */
} chain_run;

static int64_t chain_buffers(const fd_model *m, const fd_chain *c) {
    int64_t row = 4 * ((int64_t)m->head.n + 2 * (int64_t)m->hidden + 7);
    return row * c->drafts.num_drafts + 10 * 64 + level_bytes(&c->drafts);
}

static fd_rows level_of(const fd_chain *c, int num_rows) {
    return (fd_rows){.num_rows = num_rows, .page_size = c->page_size, .num_logits = num_rows, .max_keys = c->max_keys};
}

/* Sizes that no pass exceeds. */
static fd_rows widest_pass(const fd_chain *c) {
    int first_rows = c->first ? c->first->num_rows : 0;
    return level_of(c, first_rows > c->drafts.num_drafts ? first_rows : c->drafts.num_drafts);
}

static int64_t chain_scratch(const fd_model *m, const fd_chain *c, int threads) {
    fd_rows widest = widest_pass(c);
    return decoder_only_scratch(m, &widest, threads) + chain_buffers(m, c);
}

/* Lays out the buffers; returns the scratch memory of the passes behind them. */
static char *set_level_buffers(chain_run *r, const fd_model *m, char *scratch) {
    int64_t n = r->chain->drafts.num_drafts;
    r->logits = take_buffer(&scratch, 4 * n * m->head.n);
    r->features = take_buffer(&scratch, 4 * n * m->hidden);
    r->inputs = take_buffer(&scratch, 4 * n * m->hidden);
    int32_t **lists[] = {&r->row.token,       &r->row.write_slot,    &r->row.page_offset, &r->row.path_offset,
                         &r->row.num_committed, &r->row.path_length, &r->row.logit_row};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) *lists[i] = take_buffer(&scratch, 4 * n);
    return start_drafts(&r->level, &r->chain->drafts, scratch);
}

/* Adds the samples to the drafts and prepares the pass over those that grow on. */
static void start_level(chain_run *r) {
    const fd_chain *c = r->chain;
    level_rows *l = &r->row;
    int hidden = r->o.model->hidden, count = 0, max_depth = c->drafts.max_depth, depth = r->level.depth;
    int num_sampled = is_drafting(&r->level) ? r->level.num_growing : 0;
    for (int i = 0; i < num_sampled; i++) {
        int b = r->level.growing[i];
        if (!add_token(&r->level, i)) continue;
        if (r->o.model->input_kind != FD_EMBEDDED) {
            int from = depth ? i : c->first ? c->first->logit_rows[b] : b;
            memcpy(r->inputs + (long)count * hidden, r->last_features + (long)from * hidden, 4 * (size_t)hidden);
        }
        r->level.growing[count] = b;
        l->token[count] = r->level.sampled[i];
        l->path_offset[count] = b * (max_depth + 1);
        l->path_length[count] = depth + 2;
        l->write_slot[count] = c->slots[l->path_offset[count] + depth + 1];
        l->page_offset[count] = c->page_offset[b];
        l->num_committed[count] = c->starts[b];
        l->logit_row[count] = count;
        count++;
    }
    finish_level(&r->level, count);
    r->rows.num_rows = r->rows.num_logits = count;
    r->o.d.rows = &r->rows;
    r->o.d.pass = &r->pass;
    set_buffers(&r->o.d);
    r->level.logits = r->logits;
    r->last_features = r->features;
}

static void chain_body(void *arg, fd_team *team) {
    chain_run *r = arg;
    char *scores = take_scores(&r->o.d);
    sampler s;
    int has_memory = set_up_level(&r->level, &s);
    if (r->chain->first) {
        run_decoder_only(&r->o, team, scores);
        fd_barrier(team);
    }
    for (;;) {
        if (has_memory) sample_level(&r->level, team, &s);
        fd_barrier(team);
        FOR_EACH_ITEM(i, 1) start_level(r);
        fd_barrier(team);
        if (!r->level.num_growing) return;
        run_decoder_only(&r->o, team, scores);
        fd_barrier(team);
    }
}

/* Returns DRAFTS_DONE; DRAFTS_UNCERTAIN if rounding decides a race, which is then left to the reference. */
static int draft_chains(const fd_model *m, const fd_chain *c, const fd_pass *first) {
    fd_rows widest = widest_pass(c);
    chain_run r = {.chain = c, .rows = level_of(c, c->drafts.num_drafts), .pass = *first, .last_features = first->features};
    r.pass.scratch = set_level_buffers(&r, m, first->scratch);
    r.level.logits = first->logits;
    r.level.stride = m->head.n;
    fd_pass first_pass = *first;
    first_pass.scratch = r.pass.scratch;
    r.pass.logits = r.logits;
    r.pass.features = r.features;
    r.pass.inputs = r.inputs;
    r.rows.tokens = r.row.token;
    r.rows.write_slots = r.row.write_slot;
    r.rows.pages = c->pages;
    r.rows.page_offset = r.row.page_offset;
    r.rows.path_slots = c->slots;
    r.rows.path_offset = r.row.path_offset;
    r.rows.num_committed = r.row.num_committed;
    r.rows.path_length = r.row.path_length;
    r.rows.logit_rows = r.row.logit_row;
    r.o = (decoder_only){.model = m, .d = {.shape = decoder_only_shape(m, &widest),
                                           .rows = c->first ? c->first : &r.rows, .pass = &first_pass}};
    set_buffers(&r.o.d); /* the members' scores lie behind the buffers of the widest pass, which is the first */
    fd_parallel(chain_body, &r);
    return r.level.status;
}

#endif
