/* Activation functions of MLPs. */
#ifndef FD_ACTIVATION_H
#define FD_ACTIVATION_H

#include <math.h>

#include "foredraft.h"
#include "simd.h"

/* FD_SILU or FD_GELU_TANH. */
INLINE vf activate(int kind, vf x) {
    if (kind == FD_SILU) return x * vsigmoid(x);
    return 0.5f * x * (1.0f + vtanh(0.7978845608f * multiply_add(0.044715f * x * x, x, x)));
}

/* In place; any kind. */
static void activate_row(int kind, float *x, int n) {
    if (kind == FD_RELU) {
        for (int i = 0; i < n; i++) x[i] = x[i] > 0 ? x[i] : 0;
    } else if (kind == FD_GELU) {
        for (int i = 0; i < n; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    } else {
        int i = 0;
        for (; i + LANES <= n; i += LANES) store(x + i, activate(kind, load(x + i)));
        if (i == n) return;
        float rest[LANES] = {0};
        memcpy(rest, x + i, (size_t)(n - i) * 4);
        store(rest, activate(kind, load(rest)));
        memcpy(x + i, rest, (size_t)(n - i) * 4);
    }
}

#endif
