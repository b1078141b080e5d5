/* Weight-only int8 and int4. */
#ifndef FD_QUANT_H
#define FD_QUANT_H

#include "foredraft.h"
#include "simd.h"
#include "sink.h"

INLINE long quant_row_bytes(const fd_weight *w) { return (long)w->k * 4; }
INLINE long quant_panel_bytes(const fd_weight *w) { return (long)w->k * FD_PANEL; }
static void quant_prepare(const fd_weight *w, const float *x, char *to) { (void)w, (void)x, (void)to; }
static void quant_multiply(const fd_weight *w, const char *x, int rows, int first, int last, const sink *s) {
    (void)w, (void)x, (void)rows, (void)first, (void)last, (void)s;
}

#endif
