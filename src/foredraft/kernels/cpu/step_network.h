/* Steps of the small networks that read the target's last state: MLP speculator, with an MLP or an LSTM cell, Hydra and
 * blockwise heads. A step reads a state and a token for each of its rows, and computes the next states and logits. States
 * are float32; only the inputs of products are rounded. A row's bits do not depend on other rows. */
#ifndef FD_STEP_NETWORK_H
#define FD_STEP_NETWORK_H

#include "activation.h"
#include "decoder.h"
#include "foredraft.h"
#include "linear.h"
#include "norm.h"
#include "team.h"

enum { FORGET, TAKE, GIVE, CANDIDATE, NUM_GATES }; /* of an LSTM cell, in the order of its product */

/* A step that runs. `next` may not overlap `states`. */
typedef struct {
    const fd_step_network *network;
    const fd_step *step;
    fd_step_pass pass;
    char *input;    /* [rows] input of the next product, in the format of its weight */
    float *product; /* [rows, product_width] */
    float *residual; /* HEADS: [rows, hidden] */
    int num_heads;  /* PARALLEL: heads to run */
} step_run;

/* Width of the states that a step reads. */
INLINE long state_width(const fd_step_network *n, int step) {
    if (n->kind == FD_STEP_HEADS) return (step + 1l) * n->hidden;
    if (!step || n->kind == FD_STEP_PARALLEL) return n->hidden;
    return n->kind == FD_STEP_LSTM ? 2l * n->inner : n->inner;
}

INLINE long logit_rows(const fd_step_network *n) { return n->kind == FD_STEP_PARALLEL ? n->num_steps : 1; }

static long product_width(const fd_step_network *n) {
    long width = 0;
    for (int i = 0; i < n->num_steps; i++) {
        const fd_step *s = &n->steps[n->kind == FD_STEP_PARALLEL ? 0 : i];
        width = max_long(width, s->input.n);
        for (int j = 0; j < s->num_blocks; j++) width = max_long(width, s->blocks[j].n);
    }
    return width;
}

static long step_input_bytes(const fd_step_network *n) {
    long bytes = 0;
    for (int i = 0; i < n->num_steps; i++) {
        const fd_step *s = &n->steps[n->kind == FD_STEP_PARALLEL ? 0 : i];
        bytes = max_long(bytes, logit_rows(n) * row_bytes(&s->head));
        if (s->input.n) bytes = max_long(bytes, row_bytes(&s->input));
        for (int j = 0; j < s->num_blocks; j++) bytes = max_long(bytes, row_bytes(&s->blocks[j]));
    }
    return bytes;
}

static int64_t step_scratch(const fd_step_network *n, int rows) {
    return rows * (step_input_bytes(n) + 4 * (product_width(n) + n->hidden)) + 4 * 64;
}

static step_run start_step(const fd_step_network *n, const fd_step_pass *p) {
    step_run r = {.network = n, .pass = *p, .num_heads = n->num_steps};
    r.step = &n->steps[n->kind == FD_STEP_PARALLEL ? 0 : p->step];
    r.input = align(p->scratch);
    r.product = (float *)align(r.input + p->num_rows * step_input_bytes(n));
    r.residual = (float *)align((char *)(r.product + p->num_rows * product_width(n)));
    return r;
}

INLINE const float *state_row(const step_run *r, int row) {
    return r->pass.states + row * state_width(r->network, r->pass.step);
}
INLINE float *next_row(const step_run *r, int row) {
    return r->pass.next + row * state_width(r->network, r->pass.step + 1);
}
INLINE void read_input(const step_run *r, const fd_weight *w, const float *x, int row) {
    convert_row(w, x, r->input + row * row_bytes(w));
}

/* product = input W^T + bias */
static void multiply_rows(step_run *r, fd_team *team, const fd_weight *w) {
    epilogue to_product = store_to(w, r->product, w->n, 1.0f);
    matmul(team, w, r->input, r->pass.num_rows, &to_product);
    fd_barrier(team);
}

static void sigmoid_row(float *x, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, vsigmoid(load(x + i)));
    if (i == n) return;
    float rest[LANES] = {0};
    memcpy(rest, x + i, (size_t)(n - i) * 4);
    store(rest, vsigmoid(load(rest)));
    memcpy(x + i, rest, (size_t)(n - i) * 4);
}

/* x = GELU(norm(x) + shift) */
static void norm_and_activate(const fd_step_network *n, fd_norm norm, float *x) {
    rms_norm(x, norm.weight, n->eps, n->inner, x);
    for (int i = 0; i < n->inner; i++) x[i] += norm.bias[i];
    activate_row(FD_GELU, x, n->inner);
}

static void look_up_embedding(const step_run *r, int row, int width, float *to) {
    long at = (long)r->pass.tokens[row] * width;
    const uint16_t *half = (const uint16_t *)r->step->embedding + at;
    if (!r->network->has_bf16_embedding) memcpy(to, (const float *)r->step->embedding + at, (size_t)width * 4);
    else for (int i = 0; i < width; i++) to[i] = bf16_to_float(half[i]);
}

/* x += share * embedding of the row's token, in each gate */
static void add_embedding(const step_run *r, int row, int num_gates, float *x) {
    int inner = r->network->inner;
    float embedded[inner];
    look_up_embedding(r, row, inner, embedded);
    for (int g = 0; g < num_gates; g++)
        for (int i = 0; i < inner; i++)
            x[g * inner + i] = multiply_add_scalar(r->network->token_share, embedded[i], x[g * inner + i]);
}

static void run_mlp_cell(const step_run *r, int row) {
    const fd_step_network *n = r->network;
    float *x = r->product + (long)row * n->inner;
    add_embedding(r, row, 1, x);
    norm_and_activate(n, r->step->norm, x);
    memcpy(next_row(r, row), x, (size_t)n->inner * 4);
}

/* A state is [state, cell]; the target's has no cell, which counts as zero. */
static void run_lstm_cell(const step_run *r, int row) {
    const fd_step_network *n = r->network;
    int inner = n->inner;
    float *gates = r->product + (long)row * NUM_GATES * inner, *candidate = gates + CANDIDATE * inner;
    float *state = next_row(r, row), *cell = state + inner;
    add_embedding(r, row, NUM_GATES, gates);
    sigmoid_row(gates, CANDIDATE * inner);
    norm_and_activate(n, r->step->cell_norm, candidate);
    const float *old = r->pass.step ? state_row(r, row) + inner : NULL;
    for (int i = 0; i < inner; i++) {
        cell[i] = gates[TAKE * inner + i] * candidate[i];
        if (old) cell[i] = multiply_add_scalar(gates[FORGET * inner + i], old[i], cell[i]);
    }
    memcpy(state, cell, (size_t)inner * 4);
    norm_and_activate(n, r->step->norm, state);
    for (int i = 0; i < inner; i++) state[i] *= gates[GIVE * inner + i];
}

static void run_cell(step_run *r, fd_team *team) {
    const fd_step_network *n = r->network;
    const fd_step *s = r->step;
    FOR_EACH_ITEM(i, r->pass.num_rows) {
        if (r->pass.step || !n->input_weight) {
            read_input(r, &s->input, state_row(r, i), i);
            continue;
        }
        float normed[n->hidden];
        rms_norm(state_row(r, i), n->input_weight, n->eps, n->hidden, normed);
        read_input(r, &s->input, normed, i);
    }
    fd_barrier(team);
    multiply_rows(r, team, &s->input);
    FOR_EACH_ITEM(i, r->pass.num_rows) {
        if (n->kind == FD_STEP_LSTM) run_lstm_cell(r, i);
        else run_mlp_cell(r, i);
        read_input(r, &s->head, next_row(r, i), i);
    }
    fd_barrier(team);
}

/* Appends the token's embedding to a state. */
static void extend_state(const step_run *r, int row) {
    long width = state_width(r->network, r->pass.step);
    memcpy(next_row(r, row), state_row(r, row), (size_t)width * 4);
    look_up_embedding(r, row, r->network->hidden, next_row(r, row) + width);
}

/* Residual blocks W_r x + b_r + SiLU(W x + b), then x + SiLU(W x + b). The last product's input is that of the head. */
static void run_heads(step_run *r, fd_team *team) {
    const fd_step *s = r->step;
    int hidden = r->network->hidden, rows = r->pass.num_rows;
    FOR_EACH_ITEM(i, rows) {
        extend_state(r, i);
        read_input(r, s->input.n ? &s->input : &s->blocks[0], next_row(r, i), i);
    }
    fd_barrier(team);
    if (s->input.n) {
        multiply_rows(r, team, &s->input);
        FOR_EACH_ITEM(i, rows) read_input(r, &s->blocks[0], r->product + (long)i * s->input.n, i);
        fd_barrier(team);
    }
    for (int j = 0; j < s->num_blocks; j++) {
        const fd_weight *w = &s->blocks[j];
        multiply_rows(r, team, w);
        FOR_EACH_ITEM(i, rows) {
            float *y = r->product + (long)i * w->n, *x = j ? r->residual + (long)i * hidden : y + hidden;
            activate_row(FD_SILU, y, hidden);
            for (int k = 0; k < hidden; k++) r->residual[(long)i * hidden + k] = x[k] + y[k];
            read_input(r, j + 1 < s->num_blocks ? w + 1 : &s->head, r->residual + (long)i * hidden, i);
        }
        fd_barrier(team);
    }
}

/* h + W2 relu(W1 h + b1) + b2 for every head. */
static void run_block(step_run *r, fd_team *team) {
    const fd_step *s = r->step;
    const fd_weight *w = &s->blocks[0];
    int hidden = r->network->hidden, rows = r->pass.num_rows;
    FOR_EACH_ITEM(i, rows) read_input(r, &s->input, state_row(r, i), i);
    fd_barrier(team);
    multiply_rows(r, team, &s->input);
    FOR_EACH_ITEM(i, rows) {
        activate_row(FD_RELU, r->product + (long)i * s->input.n, s->input.n);
        read_input(r, w, r->product + (long)i * s->input.n, i);
    }
    fd_barrier(team);
    multiply_rows(r, team, w);
    FOR_EACH_ITEM(i, rows * r->num_heads) {
        int row = i / r->num_heads, head = i % r->num_heads;
        const float *h = state_row(r, row), *y = r->product + (long)row * w->n + (long)head * hidden;
        float x[hidden];
        for (int k = 0; k < hidden; k++) x[k] = h[k] + y[k];
        read_input(r, &s->head, x, i);
    }
    fd_barrier(team);
}

static void run_step(step_run *r, fd_team *team) {
    const fd_weight *head = &r->step->head;
    int rows = r->pass.num_rows;
    if (r->network->kind == FD_STEP_HEADS) run_heads(r, team);
    else if (r->network->kind == FD_STEP_PARALLEL) run_block(r, team), rows *= r->num_heads;
    else run_cell(r, team);
    epilogue to_logits = store_to(head, r->pass.logits, head->n, 1.0f);
    matmul(team, head, r->input, rows, &to_logits);
    fd_barrier(team);
}

static void step_body(void *arg, fd_team *team) { run_step(arg, team); }

/* Computes one step of all rows. */
static void forward_step(const fd_step_network *n, const fd_step_pass *p) {
    step_run r = start_step(n, p);
    fd_parallel(step_body, &r);
}

#endif
