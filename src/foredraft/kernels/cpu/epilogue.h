/* Epilogue of a product: what happens to its results before they are stored. */
#ifndef FD_EPILOGUE_H
#define FD_EPILOGUE_H

#include "activation.h"
#include "foredraft.h"
#include "simd.h"

enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_GATE, EPILOGUE_SCATTER };

/* STORE: out = scale * y. ADD: out += scale * y. GATE: a panel is 16 gates and 16 values, and gives 16 outputs. SCATTER:
 * ADD to row to_row[row], with the row's own scale. In all of them y includes the bias. */
typedef struct {
    int mode, activation, n;
    float *out;
    long stride;
    const float *bias;
    float scale;
    const int32_t *to_row; /* SCATTER */
    const float *row_scale;
    float alpha, limit; /* GATE with the activation CLAMPED */
} epilogue;

INLINE vf apply_gate(const epilogue *e, vf x, vf y) {
    if (e->activation != FD_CLAMPED) return activate(e->activation, x) * y;
    vf limit = broadcast(e->limit);
    x = vmin(x, limit);
    y = vmin(vmax(y, -limit), limit);
    return (y + 1.0f) * (x * vsigmoid(e->alpha * x));
}

/* Writes one panel's 32 results of one row. */
static void apply_epilogue(const epilogue *e, int panel, long row, float *y) {
    int first = panel * FD_PANEL, count = e->n - first < FD_PANEL ? e->n - first : FD_PANEL;
    if (e->bias)
        for (int i = 0; i < count; i++) y[i] += e->bias[first + i];
    if (e->mode == EPILOGUE_GATE) {
        float *out = e->out + row * e->stride + panel * (FD_PANEL / 2);
        for (int i = 0; i < FD_PANEL / 2; i += LANES)
            store(out + i, apply_gate(e, load(y + i), load(y + FD_PANEL / 2 + i)));
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
