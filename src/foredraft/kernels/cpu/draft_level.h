/* One level of chains of draft tokens: the samples after the newest tokens of all drafts, from a row of logits each. What
 * computes the logits is chain.h or step_chain.h. */
#ifndef FD_DRAFT_LEVEL_H
#define FD_DRAFT_LEVEL_H

#include "decoder.h"
#include "sampler.h"

enum { DRAFTS_DONE = 0, DRAFTS_NO_MEMORY = -1, DRAFTS_UNCERTAIN = -2 };

/* Ways of sampling: the likeliest of the network's columns; a token of the whole vocabulary; the same with its q. */
enum { LIKELIEST, SAMPLED, SAMPLED_WITH_Q, NUM_SAMPLERS };

typedef struct {
    const fd_drafts *drafts;
    const float *logits; /* of the newest pass; row i belongs to draft growing[i] */
    int64_t stride;
    int32_t *growing, *sampled; /* [num_drafts] by row */
    float *expanded;            /* [num_drafts, vocab], if the network lacks tokens */
    int depth, num_growing, status;
    int is_by_draft; /* whether row b of the logits belongs to draft b */
    atomic_int has_no_memory;
} draft_level;

INLINE int is_expanded(const fd_drafts *d) { return d->token_ids || d->columns != d->vocab; }

static int64_t level_bytes(const fd_drafts *d) {
    return (8 + (is_expanded(d) ? 4 * (int64_t)d->vocab : 0)) * d->num_drafts + 4 * 64;
}

static void *take_buffer(char **from, int64_t bytes) {
    char *taken = align(*from);
    *from = taken + bytes;
    return taken;
}

/* Starts drafts of no token, with buffers from `scratch`; returns the scratch memory behind them. */
static char *start_drafts(draft_level *l, const fd_drafts *d, char *scratch) {
    int64_t n = d->num_drafts;
    *l = (draft_level){.drafts = d, .num_growing = d->num_drafts};
    l->growing = take_buffer(&scratch, 4 * n);
    l->sampled = take_buffer(&scratch, 4 * n);
    l->expanded = take_buffer(&scratch, is_expanded(d) ? 4 * n * d->vocab : 0);
    for (int b = 0; b < d->num_drafts; b++) l->growing[b] = b, d->counts[b] = 0;
    return scratch;
}

/* Gives a member of the team its sampler. Returns 0, which ends the drafts, without memory. */
static int set_up_level(draft_level *l, sampler *s) {
    int has_memory = set_up_sampler(s, l->drafts->vocab > l->drafts->columns ? l->drafts->vocab : l->drafts->columns);
    if (!has_memory) atomic_store(&l->has_no_memory, 1);
    return has_memory;
}

/* The network's logits as a row over the vocabulary; -inf for the tokens that it does not have. */
static void expand_logits(const fd_drafts *d, const float *from, float *to) {
    for (int i = 0; i < d->vocab; i++) to[i] = NO_LOGIT;
    for (int i = 0; i < d->columns; i++) to[d->token_ids ? d->token_ids[i] : i] = from[i];
}

/* Samples the next token of a row's draft. */
static int32_t sample_draft(draft_level *l, sampler *s, const fd_sampling *jobs, int row) {
    const fd_drafts *d = l->drafts;
    int b = l->growing[row];
    int64_t at = l->is_by_draft ? b : row;
    const fd_settings *settings = &d->settings[b];
    if (!(settings->temperature > 0)) {
        s->job = &jobs[LIKELIEST];
        int32_t column = sample_row(s, at, settings, 0, NULL);
        return column >= 0 && d->token_ids ? d->token_ids[column] : column;
    }
    int with_q = d->uses_q[b];
    s->job = &jobs[with_q ? SAMPLED_WITH_Q : SAMPLED];
    if (is_expanded(d)) {
        expand_logits(d, l->logits + at * l->stride, l->expanded + (int64_t)row * d->vocab);
        at = row;
    }
    float *q = with_q ? d->q + ((int64_t)b * (d->max_depth + 1) + l->depth) * d->vocab : NULL;
    return sample_row(s, at, settings, (uint64_t)d->keys[(int64_t)b * d->max_depth + l->depth], q);
}

/* Jobs of the samplers over the newest logits; only their kind, size and place are read. */
static void describe_jobs(const draft_level *l, fd_sampling *jobs) {
    const fd_drafts *d = l->drafts;
    fd_sampling raw = {.logits = l->logits, .stride = l->stride, .vocab = d->columns, .margin = d->margin};
    fd_sampling full = raw;
    if (is_expanded(d)) full.logits = l->expanded, full.stride = d->vocab;
    full.vocab = d->vocab;
    jobs[LIKELIEST] = raw;
    jobs[SAMPLED] = jobs[SAMPLED_WITH_Q] = full;
    jobs[SAMPLED_WITH_Q].probs = d->q;
}

/* The team shares the rows; a barrier must follow. */
static void sample_level(draft_level *l, fd_team *team, sampler *s) {
    fd_sampling jobs[NUM_SAMPLERS];
    describe_jobs(l, jobs);
    FOR_EACH_ITEM(i, l->num_growing) l->sampled[i] = sample_draft(l, s, jobs, i);
}

/* Whether the samples of this level are sound; otherwise `status` says why not, and all drafts end. */
static int is_drafting(draft_level *l) {
    for (int i = 0; i < l->num_growing && l->status == DRAFTS_DONE; i++)
        if (l->sampled[i] == UNCERTAIN_TOKEN) l->status = DRAFTS_UNCERTAIN;
    if (atomic_load(&l->has_no_memory)) l->status = DRAFTS_NO_MEMORY;
    return l->status == DRAFTS_DONE;
}

static int is_end(const fd_drafts *d, int b, int32_t token) {
    for (int i = d->end_offset[b]; i < d->end_offset[b + 1]; i++)
        if (d->end_ids[i] == token) return 1;
    return 0;
}

/* Adds the sample of a row to its draft. Returns whether the draft grows on. A last token has no q of its own. */
static int add_token(const draft_level *l, int row) {
    const fd_drafts *d = l->drafts;
    int b = l->growing[row], depth = l->depth;
    int32_t token = l->sampled[row];
    if (token < 0) return 0;
    d->tokens[(int64_t)b * d->max_depth + depth] = token;
    d->counts[b] = depth + 1;
    if (depth + 1 < d->depths[b] && !is_end(d, b, token)) return 1;
    if (d->uses_q[b])
        memset(d->q + ((int64_t)b * (d->max_depth + 1) + depth + 1) * d->vocab, 0, sizeof(float) * (size_t)d->vocab);
    return 0;
}

/* Goes to the next level with the drafts growing[0] to growing[count - 1]. */
static void finish_level(draft_level *l, int count) {
    l->num_growing = l->status == DRAFTS_DONE ? count : 0;
    l->depth++;
}

#endif
