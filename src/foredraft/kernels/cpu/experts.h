/* A mixture of experts in place of a layer's MLP: a router chooses the experts of every row.
 *
 * The rows of a pass are sorted by expert, so each chosen expert is read once, whatever the number of its rows. A row
 * adds the outputs of its experts in the order of their indices, so its bits do not depend on the other rows.
 */
#ifndef FD_EXPERTS_H
#define FD_EXPERTS_H

#include "decoder.h"

/* A place is one row at one of its experts. Places are sorted by expert, then by row. P places = rows * per_token. */
typedef struct {
    float *logits;      /* [rows, count] of the router */
    int32_t *chosen;    /* [rows, per_token] experts, ascending */
    float *weight;      /* [rows, per_token] factors of their outputs */
    int32_t *offset;    /* [count + 1] first place of every expert */
    int32_t *active;    /* [count] experts with places, ascending */
    int32_t *row;       /* [P] */
    float *scale;       /* [P] the row's weight of the expert */
    float *inner;       /* [P, inner] */
    char *input;        /* [P, place_bytes] input of the next product */
    int32_t *num_active;
} expert_plan;

INLINE long place_bytes(const fd_experts *x) { return max_long(row_bytes(x->gate_up), row_bytes(x->down)); }

/* Places the buffers from `p` on. Returns the end. */
static char *place_plan(expert_plan *plan, const fd_experts *x, long rows, char *p) {
    long places = rows * x->per_token;
    plan->logits = (float *)align(p);
    plan->chosen = (int32_t *)align((char *)(plan->logits + rows * x->count));
    plan->weight = (float *)align((char *)(plan->chosen + places));
    plan->offset = (int32_t *)align((char *)(plan->weight + places));
    plan->active = (int32_t *)align((char *)(plan->offset + x->count + 1));
    plan->row = (int32_t *)align((char *)(plan->active + x->count));
    plan->scale = (float *)align((char *)(plan->row + places));
    plan->inner = (float *)align((char *)(plan->scale + places));
    plan->input = align((char *)(plan->inner + places * x->inner));
    plan->num_active = (int32_t *)align(plan->input + places * place_bytes(x));
    return (char *)(plan->num_active + 1);
}

INLINE long expert_bytes(const fd_experts *x, long rows) {
    expert_plan plan;
    char *start = (char *)64; /* aligned, as the buffers are */
    return place_plan(&plan, x, rows, start) - start;
}

/* Chooses the experts of a row: those with the largest logits, the lower index first among equal ones. Weights are a
 * softmax over all experts, or over the chosen ones if it is normalised, times `scale`. */
static void choose_experts(const fd_experts *x, const float *logits, float scale, int32_t *chosen, float *weight) {
    unsigned char is_chosen[x->count];
    memset(is_chosen, 0, sizeof is_chosen);
    float max = 0, total = 0;
    for (int j = 0; j < x->per_token; j++) {
        int best = -1;
        for (int i = 0; i < x->count; i++)
            if (!is_chosen[i] && (best < 0 || logits[i] > logits[best])) best = i;
        is_chosen[best] = 1;
        if (j == 0) max = logits[best];
    }
    for (int i = 0, j = 0; i < x->count; i++) {
        if (x->is_normalised && !is_chosen[i]) continue;
        float e = expf(logits[i] - max);
        total += e;
        if (!is_chosen[i]) continue;
        chosen[j] = i;
        weight[j++] = e;
    }
    for (int j = 0; j < x->per_token; j++) weight[j] *= scale / total;
}

/* Sorts the places by expert. */
static void sort_places(const fd_experts *x, expert_plan *plan, int rows) {
    int places = rows * x->per_token;
    int32_t *end = plan->offset + 1; /* first counts, then where the expert's next place goes */
    memset(plan->offset, 0, sizeof *plan->offset * (x->count + 1));
    for (int i = 0; i < places; i++) end[plan->chosen[i]]++;
    *plan->num_active = 0;
    for (int e = 0, first = 0; e < x->count; e++) {
        int count = end[e];
        if (count) plan->active[(*plan->num_active)++] = e;
        end[e] = first;
        first += count;
    }
    for (int i = 0; i < places; i++) {
        int to = end[plan->chosen[i]]++;
        plan->row[to] = i / x->per_token;
        plan->scale[to] = plan->weight[i];
    }
}

/* Products of the experts' gates and values: work items are panels of one expert. */
static void multiply_inner(fd_team *team, const fd_experts *x, const expert_plan *plan) {
    long stride = row_bytes(x->gate_up);
    int panels = count_panels(x->gate_up), chunk = choose_chunk(team, x->gate_up, 1, panels * *plan->num_active);
    if (chunk > panels) chunk = panels;
    int chunks = (panels + chunk - 1) / chunk;
    FOR_EACH_ITEM(i, *plan->num_active * chunks) {
        int expert = plan->active[i / chunks], first = plan->offset[expert], p = i % chunks * chunk;
        const fd_weight *w = x->gate_up + expert;
        epilogue e = store_to(w, plan->inner + (long)first * x->inner, x->inner, 1.0f);
        e.mode = EPILOGUE_GATE;
        e.activation = x->activation;
        e.alpha = x->alpha;
        e.limit = x->limit;
        multiply_range(w, plan->input + first * stride, plan->offset[expert + 1] - first, p,
                       p + chunk < panels ? p + chunk : panels, &e);
    }
    fd_barrier(team);
}

/* Adds the experts' outputs to the residual stream: work items are panels of all experts, in order. */
static void add_outputs(decoder *d, fd_team *team, const fd_experts *x, const expert_plan *plan) {
    long stride = row_bytes(x->down);
    int panels = count_panels(x->down), chunk = choose_chunk(team, x->down, 1, panels);
    FOR_EACH_ITEM(i, (panels + chunk - 1) / chunk) {
        int p = i * chunk, last = p + chunk < panels ? p + chunk : panels;
        for (int a = 0; a < *plan->num_active; a++) {
            int expert = plan->active[a], first = plan->offset[expert];
            const fd_weight *w = x->down + expert;
            epilogue e = store_to(w, d->hidden, d->shape.hidden, 1.0f);
            e.mode = EPILOGUE_SCATTER;
            e.to_row = plan->row + first;
            e.row_scale = plan->scale + first;
            multiply_range(w, plan->input + first * stride, plan->offset[expert + 1] - first, p, last, &e);
        }
    }
    fd_barrier(team);
}

/* The part of a layer after attention. `scale` multiplies what it adds to the residual stream. */
static void expert_block(decoder *d, fd_team *team, const fd_experts *x, fd_norm norm, float scale) {
    int rows = d->rows->num_rows, places = rows * x->per_token;
    expert_plan plan;
    place_plan(&plan, x, rows, d->experts);
    read_all_hidden(d, team, &x->router, norm, NO_NORM, &NO_CHANGE);
    project(d, team, &x->router, store_to(&x->router, plan.logits, x->count, 1.0f));
    FOR_EACH_ITEM(r, rows) {
        long at = (long)r * x->per_token;
        choose_experts(x, plan.logits + (long)r * x->count, scale, plan.chosen + at, plan.weight + at);
    }
    fd_barrier(team);
    FOR_EACH_ITEM(i, 1) sort_places(x, &plan, rows);
    fd_barrier(team);
    FOR_EACH_ITEM(p, places)
        convert_hidden(d, x->gate_up, norm, NO_NORM, plan.row[p], plan.input + p * row_bytes(x->gate_up));
    fd_barrier(team);
    multiply_inner(team, x, &plan);
    FOR_EACH_ITEM(p, places)
        convert_row(x->down, plan.inner + (long)p * x->inner, plan.input + p * row_bytes(x->down));
    fd_barrier(team);
    add_outputs(d, team, x, &plan);
}

#endif
