/* Destination of the results of a product. */
#ifndef FD_SINK_H
#define FD_SINK_H

#include "foredraft.h"
#include "simd.h"

enum { SINK_STORE, SINK_ADD, SINK_GATE };

/* Destination of results. GATE: a panel is 16 gates and 16 values, and gives 16 outputs. */
typedef struct {
    int mode, activation, n;
    float *out;
    long stride;
    const float *bias;
    float scale;
} sink;

INLINE vf activate(int kind, vf x) {
    if (kind == FD_SILU) return x * sigmoid(x);
    return 0.5f * x * (1.0f + tangent(0.7978845608f * multiply_add(0.044715f * x * x, x, x)));
}

/* Writes one panel's 32 results of one row. */
static void drain(const sink *s, int panel, long row, float *v) {
    int first = panel * FD_PANEL, count = s->n - first < FD_PANEL ? s->n - first : FD_PANEL;
    if (s->bias)
        for (int i = 0; i < count; i++) v[i] += s->bias[first + i];
    if (s->mode == SINK_GATE) {
        float *out = s->out + row * s->stride + panel * (FD_PANEL / 2);
        for (int i = 0; i < FD_PANEL / 2; i += LANES)
            store(out + i, activate(s->activation, load(v + i)) * load(v + FD_PANEL / 2 + i));
        return;
    }
    float *out = s->out + row * s->stride + first;
    if (count == FD_PANEL) {
        for (int i = 0; i < FD_PANEL; i += LANES)
            store(out + i, s->mode == SINK_ADD ? multiply_add(all(s->scale), load(v + i), load(out + i))
                                               : s->scale * load(v + i));
        return;
    }
    for (int i = 0; i < count; i++)
        out[i] = s->mode == SINK_ADD ? multiply_add_one(s->scale, v[i], out[i]) : s->scale * v[i];
}

#endif
