/* Epilogue of a product: what happens to its results before they are stored. */
#ifndef FD_EPILOGUE_H
#define FD_EPILOGUE_H

#include "activation.h"
#include "foredraft.h"
#include "simd.h"

enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_GATE };

/* STORE: out = scale * y. ADD: out += scale * y. GATE: a panel is 16 gates and 16 values, and gives 16 outputs. In all
 * of them y includes the bias. */
typedef struct {
    int mode, activation, n;
    float *out;
    long stride;
    const float *bias;
    float scale;
} epilogue;

/* Writes one panel's 32 results of one row. */
static void apply_epilogue(const epilogue *e, int panel, long row, float *y) {
    int first = panel * FD_PANEL, count = e->n - first < FD_PANEL ? e->n - first : FD_PANEL;
    if (e->bias)
        for (int i = 0; i < count; i++) y[i] += e->bias[first + i];
    if (e->mode == EPILOGUE_GATE) {
        float *out = e->out + row * e->stride + panel * (FD_PANEL / 2);
        for (int i = 0; i < FD_PANEL / 2; i += LANES)
            store(out + i, activate(e->activation, load(y + i)) * load(y + FD_PANEL / 2 + i));
        return;
    }
    float *out = e->out + row * e->stride + first;
    if (count == FD_PANEL) {
        for (int i = 0; i < FD_PANEL; i += LANES)
            store(out + i, e->mode == EPILOGUE_ADD ? multiply_add(broadcast(e->scale), load(y + i), load(out + i))
                                                   : e->scale * load(y + i));
        return;
    }
    for (int i = 0; i < count; i++)
        out[i] = e->mode == EPILOGUE_ADD ? multiply_add_scalar(e->scale, y[i], out[i]) : e->scale * y[i];
}

#endif
