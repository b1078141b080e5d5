/* A chain of draft tokens that are sampled from what followed the matches of suffix automata, with the bits of the
 * reference in drafters/suffix/drafter.py. A level has MAX_CONTINUATIONS tokens at most, so its filters and its race
 * read these alone; only q has a row over the vocabulary. */
#ifndef FD_SUFFIX_CHAIN_H
#define FD_SUFFIX_CHAIN_H

#include "draft_level.h"
#include "suffix.h"

/* Tokens that may follow, by ascending id, with their probabilities. */
typedef struct {
    int32_t tokens[MAX_CONTINUATIONS];
    double probs[MAX_CONTINUATIONS], best;
    int32_t size;
} continuations;

static void insert_continuation(continuations *c, int32_t token, double prob) {
    int32_t i = c->size++;
    for (; i > 0 && c->tokens[i - 1] > token; i--) {
        c->tokens[i] = c->tokens[i - 1];
        c->probs[i] = c->probs[i - 1];
    }
    c->tokens[i] = token;
    c->probs[i] = prob;
}

static void read_continuations(const fd_suffix_chain *chain, continuations *c) {
    int32_t tokens[MAX_CONTINUATIONS], num = chain->num_matches;
    double probs[MAX_CONTINUATIONS];
    fd_match *blended = chain->matches + num; /* blending modifies the matches */
    memcpy(blended, chain->matches, sizeof *blended * (size_t)num);
    int32_t size = fd_suffix_predict(blended, num, chain->discounts, tokens, probs);
    c->size = 0;
    c->best = size ? probs[0] : 0;
    for (int32_t i = 0; i < size; i++)
        if (tokens[i] < chain->drafts.vocab) insert_continuation(c, tokens[i], probs[i]);
}

static double find_prob(const continuations *c, int32_t token) {
    for (int32_t i = 0; i < c->size; i++)
        if (c->tokens[i] == token) return c->probs[i];
    return 0;
}

/* Samples one of the tokens, and writes their distribution to q [vocab] if that is not NULL. */
static int32_t sample_continuation(sampler *s, const continuations *c, const fd_drafts *d, int64_t key, float *q) {
    float logits[MAX_CONTINUATIONS];
    for (int32_t i = 0; i < c->size; i++) logits[i] = (float)log(c->probs[i]);
    /* a filter of a job with probabilities lists what it keeps; they are written by the other job */
    const fd_sampling listed = {.logits = logits, .vocab = c->size, .margin = d->margin, .probs = logits};
    const fd_sampling full = {.vocab = d->vocab, .margin = d->margin};
    s->job = &listed;
    int is_valid = read_row(s, 0);
    if (is_valid) {
        filter(s, d->settings);
        if (s->count < 0) list_all(s);
        for (int i = 0; i < s->count; i++) s->id[i] = c->tokens[s->id[i]];
    }
    s->job = &full;
    if (q) write_probs(s, q, is_valid);
    return is_valid ? run_race(s, (uint64_t)key) : INVALID_TOKEN;
}

/* Returns DRAFTS_DONE; DRAFTS_UNCERTAIN if rounding decides a race, which is then left to the reference. */
static int draft_suffix(const fd_suffix_chain *chain) {
    const fd_drafts *d = &chain->drafts;
    const int uses_q = d->uses_q[0];
    int32_t growing = 0, token;
    draft_level level = {.drafts = d, .growing = &growing, .sampled = &token};
    continuations found;
    sampler s;
    double path = 1; /* probability that the path is accepted; with q it may not depend on the sampled tokens */
    d->counts[0] = 0;
    *chain->expected_accepted = 0;
    if (!set_up_sampler(&s, MAX_CONTINUATIONS)) return DRAFTS_NO_MEMORY;
    for (;; level.depth++) {
        float *q = uses_q ? d->q + (int64_t)level.depth * d->vocab : NULL;
        read_continuations(chain, &found);
        if (!found.size || path * found.best < chain->min_confidence) {
            if (q) memset(q, 0, sizeof *q * (size_t)d->vocab);
            return DRAFTS_DONE;
        }
        token = sample_continuation(&s, &found, d, d->keys[level.depth], q);
        if (token == UNCERTAIN_TOKEN) return DRAFTS_UNCERTAIN;
        double prob = find_prob(&found, token);
        *chain->expected_accepted += path * prob;
        path *= uses_q ? found.best : prob;
        if (!add_token(&level, 0)) return DRAFTS_DONE;
        fd_suffix_advance(chain->matches, chain->num_matches, &token, 1);
    }
}

#endif
