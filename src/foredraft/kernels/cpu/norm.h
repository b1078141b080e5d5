/* RMSNorm and LayerNorm of one row. Sums are vectors' sums, then the rest in order. x and y may be equal. */
#ifndef FD_NORM_H
#define FD_NORM_H

#include "foredraft.h"
#include "simd.h"

#define NO_NORM ((fd_norm){0})

/* y = x / rms(x) * weight; without a weight y = x */
static void rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
    if (!weight) {
        if (x != y) memcpy(y, x, (size_t)n * 4);
        return;
    }
    vf squares = {0};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
    for (; i < n; i++) rest = multiply_add_scalar(x[i], x[i], rest);
    float scale = 1.0f / __builtin_sqrtf((reduce_sum(squares) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* y = (x - mean) / deviation * weight + bias */
static void layer_norm(const float *x, const float *weight, const float *bias, float eps, int n, float *y) {
    vf total = {0}, squares = {0};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) total += load(x + i);
    for (; i < n; i++) rest += x[i];
    float mean = (reduce_sum(total) + rest) / (float)n;
    rest = 0;
    for (i = 0; i + LANES <= n; i += LANES) {
        vf d = load(x + i) - mean;
        squares = multiply_add(d, d, squares);
    }
    for (; i < n; i++) rest = multiply_add_scalar(x[i] - mean, x[i] - mean, rest);
    float scale = 1.0f / __builtin_sqrtf((reduce_sum(squares) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES)
        store(y + i, multiply_add((load(x + i) - mean) * scale, load(weight + i), load(bias + i)));
    for (; i < n; i++) y[i] = multiply_add_scalar((x[i] - mean) * scale, weight[i], bias[i]);
}

/* A norm without a weight copies. */
static void apply_norm(fd_norm norm, const float *x, float eps, int n, float *y) {
    if (norm.bias) layer_norm(x, norm.weight, norm.bias, eps, n, y);
    else rms_norm(x, norm.weight, eps, n, y);
}

#endif
