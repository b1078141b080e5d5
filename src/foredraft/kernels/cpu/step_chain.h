/* Chains of draft tokens of a step network: all steps over a batch and the sampling between them, in one region of the
 * thread team, with the bits of calls of their own. */
#ifndef FD_STEP_CHAIN_H
#define FD_STEP_CHAIN_H

#include "draft_level.h"
#include "step_network.h"

typedef struct {
    const fd_step_roots *roots;
    draft_level level;
    step_run run;
    float *states, *next, *logits; /* [num_drafts, ..] */
    int32_t *tokens;
} step_chain;

/* Numbers of the widest state of a row. */
static long widest_state(const fd_step_network *n) {
    long width = n->hidden;
    for (int i = 1; i <= n->num_steps; i++) width = max_long(width, state_width(n, i));
    return width;
}

static int64_t step_chain_scratch(const fd_step_network *n, const fd_drafts *d) {
    int64_t row = 4 * (2 * widest_state(n) + logit_rows(n) * n->steps[0].head.n + 1);
    return row * d->num_drafts + level_bytes(d) + step_scratch(n, d->num_drafts) + 5 * 64;
}

static void read_root(const step_chain *c, int b) {
    int hidden = c->run.network->hidden;
    const void *state = c->roots->states[b];
    float *to = c->states + (long)b * hidden;
    if (!c->roots->has_bf16_states) memcpy(to, state, (size_t)hidden * 4);
    else for (int i = 0; i < hidden; i++) to[i] = bf16_to_float(((const uint16_t *)state)[i]);
}

/* Starts the next step with the drafts that grow on. */
static void start_next_step(step_chain *c) {
    draft_level *l = &c->level;
    const fd_step_network *n = c->run.network;
    long width = state_width(n, l->depth + 1);
    int num_sampled = is_drafting(l) ? l->num_growing : 0, count = 0;
    for (int i = 0; i < num_sampled; i++) {
        if (!add_token(l, i)) continue;
        if (count < i && n->kind != FD_STEP_PARALLEL)
            memcpy(c->next + count * width, c->next + i * width, (size_t)width * 4);
        c->tokens[count] = l->sampled[i];
        l->growing[count++] = l->growing[i];
    }
    finish_level(l, count);
    if (n->kind == FD_STEP_PARALLEL) { /* the logits of all levels are there */
        l->logits = c->logits + (long)l->depth * n->steps[0].head.n;
        return;
    }
    float *states = c->next;
    c->next = c->states;
    c->states = states;
    fd_step_pass p = c->run.pass;
    p.states = c->states;
    p.next = c->next;
    p.step = l->depth;
    p.num_rows = count;
    if (count) c->run = start_step(n, &p);
}

static void step_chain_body(void *arg, fd_team *team) {
    step_chain *c = arg;
    sampler s;
    int has_memory = set_up_level(&c->level, &s);
    FOR_EACH_ITEM(b, c->level.num_growing) read_root(c, b);
    fd_barrier(team);
    run_step(&c->run, team);
    for (;;) {
        if (has_memory) sample_level(&c->level, team, &s);
        fd_barrier(team);
        FOR_EACH_ITEM(i, 1) start_next_step(c);
        fd_barrier(team);
        if (!c->level.num_growing) return;
        if (!c->level.is_by_draft) run_step(&c->run, team);
    }
}

/* Returns DRAFTS_DONE; DRAFTS_UNCERTAIN if rounding decides a race, which is then left to the reference. */
static int draft_steps(const fd_step_network *n, const fd_drafts *d, const fd_step_roots *roots) {
    step_chain c = {.roots = roots};
    char *scratch = start_drafts(&c.level, d, roots->scratch);
    c.states = take_buffer(&scratch, 4 * d->num_drafts * widest_state(n));
    c.next = take_buffer(&scratch, 4 * d->num_drafts * widest_state(n));
    c.logits = take_buffer(&scratch, 4 * d->num_drafts * logit_rows(n) * n->steps[0].head.n);
    c.tokens = take_buffer(&scratch, 4 * d->num_drafts);
    memcpy(c.tokens, roots->tokens, 4 * (size_t)d->num_drafts);
    fd_step_pass first = {.states = c.states, .tokens = c.tokens, .next = c.next, .logits = c.logits,
                          .scratch = scratch, .num_rows = d->num_drafts};
    c.run = start_step(n, &first);
    if (c.run.num_heads > d->max_depth) c.run.num_heads = d->max_depth;
    c.level.logits = c.logits;
    c.level.is_by_draft = n->kind == FD_STEP_PARALLEL;
    c.level.stride = (int64_t)n->steps[0].head.n * (c.level.is_by_draft ? c.run.num_heads : 1);
    fd_parallel(step_chain_body, &c);
    return c.level.status;
}

#endif
