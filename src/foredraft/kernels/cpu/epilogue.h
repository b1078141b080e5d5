/* Epilogue of a product: what happens to its results before they are stored. */
#ifndef FD_EPILOGUE_H
#define FD_EPILOGUE_H

#include "activation.h"
#include "foredraft.h"
#include "simd.h"

enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_GATE, EPILOGUE_SCATTER };

/* What adapters add to one product of a layer; rows NULL = nothing. */
typedef struct {
    const fd_adapted *rows;
    int layer, product;
} change;

#define NO_CHANGE ((change){0})

INLINE const fd_low_rank *find_low_rank(const change *c, int place) {
    return &c->rows->change[place][c->layer].of[c->product];
}

/* STORE: out = scale * y. ADD: out += scale * y. GATE: a panel is 16 gates and 16 values, and gives 16 outputs. SCATTER:
 * ADD to row to_row[row], with the row's own scale. In all of them y includes the bias and what adapters add. */
typedef struct {
    int mode, activation, n;
    float *out; /* GATE: `rounded` if is_rounded */
    long stride;
    const float *bias;
    float scale;
    const int32_t *to_row; /* SCATTER */
    const float *row_scale;
    float alpha, limit; /* GATE with the activation CLAMPED */
    int is_rounded;     /* GATE: the outputs are inputs of a bf16 product */
    change added;       /* not in SCATTER */
} epilogue;

INLINE vf apply_gate(const epilogue *e, vf x, vf y) {
    if (e->activation != FD_CLAMPED) return activate(e->activation, x) * y;
    vf limit = broadcast(e->limit);
    x = vmin(x, limit);
    y = vmin(vmax(y, -limit), limit);
    return (y + 1.0f) * (x * vsigmoid(e->alpha * x));
}

#define CHAINS 4 /* sums over the rank side by side, because one chain would wait for every addition */

/* Adds one block of B times `width` numbers x to y: column j goes to chain j % CHAINS, and the chains are added in order. */
INLINE void add_block(const float *b, const float *x, int width, float *y) {
    for (int i = 0; i < FD_BLOCK; i += LANES) {
        vf sums[CHAINS] = {0};
        int j = 0;
        for (; j + CHAINS <= width; j += CHAINS)
            _Pragma("GCC unroll 4") for (int c = 0; c < CHAINS; c++)
                sums[c] = multiply_add(load(b + (j + c) * FD_BLOCK + i), broadcast(x[j + c]), sums[c]);
        for (int c = 0; j < width; j++, c++) sums[c] = multiply_add(load(b + j * FD_BLOCK + i), broadcast(x[j]), sums[c]);
        store(y + i, load(y + i) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
    }
}

/* Adds B (A x) of a row's adapter to a panel. The order of the additions depends on the widths alone. */
static void add_low_rank(const change *c, int panel, long row, float *y) {
    int place = c->rows->place[row];
    if (place < 0) return;
    const fd_low_rank *m = find_low_rank(c, place);
    if (!m->a.n) return;
    const float *x = c->rows->inner + (long)place * c->rows->max_rank;
    int first = panel * (FD_PANEL / FD_BLOCK);
    _Pragma("GCC unroll 2") for (int i = first; i < first + FD_PANEL / FD_BLOCK; i++, y += FD_BLOCK)
        add_block(m->b + m->offset[i], x + m->column[i], m->width[i], y);
}

/* Writes one panel's 32 results of one row. */
static void apply_epilogue(const epilogue *e, int panel, long row, float *y) {
    int first = panel * FD_PANEL, count = e->n - first < FD_PANEL ? e->n - first : FD_PANEL;
    if (e->bias)
        for (int i = 0; i < count; i++) y[i] += e->bias[first + i];
    if (e->added.rows) add_low_rank(&e->added, panel, row, y);
    if (e->mode == EPILOGUE_GATE) {
        long at = row * e->stride + panel * (FD_PANEL / 2);
        for (int i = 0; i < FD_PANEL / 2; i += LANES) {
            vf value = apply_gate(e, load(y + i), load(y + FD_PANEL / 2 + i));
            if (e->is_rounded) store_rounded((rounded *)e->out + at + i, value);
            else store(e->out + at + i, value);
        }
        return;
    }
    float scale = e->mode == EPILOGUE_SCATTER ? e->row_scale[row] : e->scale;
    float *out = e->out + (e->mode == EPILOGUE_SCATTER ? e->to_row[row] : row) * e->stride + first;
    int is_added = e->mode != EPILOGUE_STORE;
    if (count == FD_PANEL) {
        for (int i = 0; i < FD_PANEL; i += LANES)
            store(out + i, is_added ? multiply_add(broadcast(scale), load(y + i), load(out + i)) : scale * load(y + i));
        return;
    }
    for (int i = 0; i < count; i++)
        out[i] = is_added ? multiply_add_scalar(scale, y[i], out[i]) : scale * y[i];
}

#endif
