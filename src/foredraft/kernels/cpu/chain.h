/* Chains of draft tokens: all passes of a draft network over a batch and the sampling between them, in one region of the
 * thread team. The passes are those of decoder_only.h and the samples those of sampler.h, with the same bits as in calls
 * of their own. */
#ifndef FD_CHAIN_H
#define FD_CHAIN_H

#include "decoder_only.h"
#include "sampler.h"

enum { CHAIN_DONE = 0, CHAIN_NO_MEMORY = -1, CHAIN_UNCERTAIN = -2 };

/* Ways of sampling: the likeliest of the network's columns; a token of the whole vocabulary; the same with its q. */
enum { LIKELIEST, SAMPLED, SAMPLED_WITH_Q, NUM_SAMPLERS };

/* Rows of the pass over the newest tokens. Row i belongs to draft growing[i]. */
typedef struct {
    int32_t *growing, *token, *write_slot, *page_offset, *path_offset, *num_committed, *path_length, *logit_row;
} level_rows;

typedef struct {
    const fd_chain *chain;
    decoder_only o;
    fd_rows rows;
    fd_pass pass;
    level_rows level;
    int32_t *sampled; /* [num_drafts] by row */
    float *logits, *features, *inputs, *expanded; /* of the levels, [num_drafts, ..] */
    const float *last_logits, *last_features;     /* of the newest pass, by row */
    int depth, num_growing, status;
    atomic_int has_no_memory;
} chain_run;

INLINE int is_expanded(const fd_chain *c) { return c->token_ids || c->columns != c->vocab; }

static int64_t chain_buffers(const fd_model *m, const fd_chain *c) {
    int64_t row = 4 * ((int64_t)m->head.n + 2 * (int64_t)m->hidden + (is_expanded(c) ? c->vocab : 0) + 9);
    return row * c->num_drafts + 16 * 64;
}

static fd_rows level_of(const fd_chain *c, int num_rows) {
    return (fd_rows){.num_rows = num_rows, .page_size = c->page_size, .num_logits = num_rows, .max_keys = c->max_keys};
}

static int64_t chain_scratch(const fd_model *m, const fd_chain *c, int threads) {
    fd_rows widest = level_of(c, c->num_drafts);
    if (c->first && c->first->num_rows > widest.num_rows) widest.num_rows = c->first->num_rows;
    return decoder_only_scratch(m, &widest, threads) + chain_buffers(m, c);
}

static void *take_buffer(char **from, int64_t bytes) {
    char *taken = align(*from);
    *from = taken + bytes;
    return taken;
}

/* Lays out the buffers; returns the scratch memory of the passes behind them. */
static char *set_level_buffers(chain_run *r, const fd_model *m, char *scratch) {
    const fd_chain *c = r->chain;
    int64_t n = c->num_drafts;
    r->logits = take_buffer(&scratch, 4 * n * m->head.n);
    r->features = take_buffer(&scratch, 4 * n * m->hidden);
    r->inputs = take_buffer(&scratch, 4 * n * m->hidden);
    r->expanded = take_buffer(&scratch, is_expanded(c) ? 4 * n * c->vocab : 0);
    r->sampled = take_buffer(&scratch, 4 * n);
    int32_t **lists[] = {&r->level.growing,     &r->level.token,         &r->level.write_slot,  &r->level.page_offset,
                         &r->level.path_offset, &r->level.num_committed, &r->level.path_length, &r->level.logit_row};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) *lists[i] = take_buffer(&scratch, 4 * n);
    return scratch;
}

/* The network's logits as a row over the vocabulary; -inf for the tokens that it does not have. */
static void expand_logits(const fd_chain *c, const float *from, float *to) {
    for (int i = 0; i < c->vocab; i++) to[i] = NO_LOGIT;
    for (int i = 0; i < c->columns; i++) to[c->token_ids ? c->token_ids[i] : i] = from[i];
}

/* Samples the next token of a row's draft. */
static int32_t sample_draft(chain_run *r, sampler *s, const fd_sampling *jobs, int row) {
    const fd_chain *c = r->chain;
    int b = r->level.growing[row];
    int64_t at = r->last_logits == r->logits ? row : b; /* the first logits are those of all drafts */
    const fd_settings *settings = &c->settings[b];
    if (!(settings->temperature > 0)) {
        s->job = &jobs[LIKELIEST];
        int32_t column = sample_row(s, at, settings, 0, NULL);
        return column >= 0 && c->token_ids ? c->token_ids[column] : column;
    }
    int with_q = c->uses_q[b];
    s->job = &jobs[with_q ? SAMPLED_WITH_Q : SAMPLED];
    if (is_expanded(c)) {
        expand_logits(c, r->last_logits + at * r->o.model->head.n, r->expanded + (int64_t)row * c->vocab);
        at = row;
    }
    float *q = with_q ? c->q + ((int64_t)b * (c->max_depth + 1) + r->depth) * c->vocab : NULL;
    return sample_row(s, at, settings, (uint64_t)c->keys[(int64_t)b * c->max_depth + r->depth], q);
}

/* Jobs of the samplers over the newest logits; only their kind, size and place are read. */
static void describe_jobs(const chain_run *r, fd_sampling *jobs) {
    const fd_chain *c = r->chain;
    fd_sampling raw = {.logits = r->last_logits, .stride = r->o.model->head.n, .vocab = c->columns, .margin = c->margin};
    fd_sampling full = raw;
    if (is_expanded(c)) full.logits = r->expanded, full.stride = c->vocab;
    full.vocab = c->vocab;
    jobs[LIKELIEST] = raw;
    jobs[SAMPLED] = jobs[SAMPLED_WITH_Q] = full;
    jobs[SAMPLED_WITH_Q].probs = c->q;
}

static int is_end(const fd_chain *c, int b, int32_t token) {
    for (int i = c->end_offset[b]; i < c->end_offset[b + 1]; i++)
        if (c->end_ids[i] == token) return 1;
    return 0;
}

/* Adds a sampled token to its draft. Returns whether the draft grows on. A last token has no q of its own. */
static int add_token(const fd_chain *c, int b, int depth, int32_t token) {
    if (token < 0) return 0;
    c->tokens[(int64_t)b * c->max_depth + depth] = token;
    c->counts[b] = depth + 1;
    if (depth + 1 < c->depths[b] && !is_end(c, b, token)) return 1;
    if (c->uses_q[b])
        memset(c->q + ((int64_t)b * (c->max_depth + 1) + depth + 1) * c->vocab, 0, sizeof(float) * (size_t)c->vocab);
    return 0;
}

/* Adds the samples to the drafts and prepares the pass over those that grow on. */
static void start_level(chain_run *r) {
    const fd_chain *c = r->chain;
    level_rows *l = &r->level;
    int hidden = r->o.model->hidden, count = 0;
    for (int i = 0; i < r->num_growing; i++)
        if (r->sampled[i] == UNCERTAIN_TOKEN) r->status = CHAIN_UNCERTAIN;
    if (atomic_load(&r->has_no_memory)) r->status = CHAIN_NO_MEMORY;
    for (int i = 0; i < r->num_growing && r->status == CHAIN_DONE; i++) {
        int b = l->growing[i];
        if (!add_token(c, b, r->depth, r->sampled[i])) continue;
        if (r->o.model->input_kind != FD_EMBEDDED) {
            int from = r->depth ? i : c->first ? c->first->logit_rows[b] : b;
            memcpy(r->inputs + (long)count * hidden, r->last_features + (long)from * hidden, 4 * (size_t)hidden);
        }
        l->growing[count] = b;
        l->token[count] = r->sampled[i];
        l->path_offset[count] = b * (c->max_depth + 1);
        l->path_length[count] = r->depth + 2;
        l->write_slot[count] = c->slots[l->path_offset[count] + r->depth + 1];
        l->page_offset[count] = c->page_offset[b];
        l->num_committed[count] = c->starts[b];
        l->logit_row[count] = count;
        count++;
    }
    r->num_growing = r->status == CHAIN_DONE ? count : 0;
    r->depth++;
    r->rows.num_rows = r->rows.num_logits = count;
    r->o.d.rows = &r->rows;
    r->o.d.pass = &r->pass;
    set_buffers(&r->o.d);
    r->last_logits = r->logits;
    r->last_features = r->features;
}

static void chain_body(void *arg, fd_team *team) {
    chain_run *r = arg;
    fd_sampling jobs[NUM_SAMPLERS];
    char *scores = take_scores(&r->o.d);
    sampler s;
    int has_memory = set_up_sampler(&s, r->chain->vocab > r->chain->columns ? r->chain->vocab : r->chain->columns);
    if (!has_memory) atomic_store(&r->has_no_memory, 1);
    if (r->chain->first) {
        run_decoder_only(&r->o, team, scores);
        fd_barrier(team);
    }
    for (;;) {
        describe_jobs(r, jobs);
        if (has_memory) FOR_EACH_ITEM(i, r->num_growing) r->sampled[i] = sample_draft(r, &s, jobs, i);
        fd_barrier(team);
        FOR_EACH_ITEM(i, 1) start_level(r);
        fd_barrier(team);
        if (!r->num_growing) return;
        run_decoder_only(&r->o, team, scores);
        fd_barrier(team);
    }
}

/* Returns CHAIN_DONE; CHAIN_UNCERTAIN if rounding decides a race, which is then left to the reference. */
static int draft_chains(const fd_model *m, const fd_chain *c, const fd_pass *first) {
    fd_rows widest = level_of(c, c->num_drafts);
    chain_run r = {.chain = c, .rows = widest, .pass = *first, .num_growing = c->num_drafts,
                   .last_logits = first->logits, .last_features = first->features};
    r.pass.scratch = set_level_buffers(&r, m, first->scratch);
    fd_pass first_pass = *first;
    first_pass.scratch = r.pass.scratch;
    r.pass.logits = r.logits;
    r.pass.features = r.features;
    r.pass.inputs = r.inputs;
    r.rows.tokens = r.level.token;
    r.rows.write_slots = r.level.write_slot;
    r.rows.pages = c->pages;
    r.rows.page_offset = r.level.page_offset;
    r.rows.path_slots = c->slots;
    r.rows.path_offset = r.level.path_offset;
    r.rows.num_committed = r.level.num_committed;
    r.rows.path_length = r.level.path_length;
    r.rows.logit_rows = r.level.logit_row;
    for (int b = 0; b < c->num_drafts; b++) r.level.growing[b] = b, c->counts[b] = 0;
    r.o = (decoder_only){.model = m, .d = {.shape = decoder_only_shape(m, &widest),
                                           .rows = c->first ? c->first : &r.rows, .pass = &first_pass}};
    set_buffers(&r.o.d); /* the members' scores lie behind the buffers of the widest pass, which is the first */
    fd_parallel(chain_body, &r);
    return r.status;
}

#endif
