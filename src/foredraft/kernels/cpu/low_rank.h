/* Low-rank products of adapters: A x of the rows that have one. The epilogue of the layer's own product adds B (A x). */
#ifndef FD_LOW_RANK_H
#define FD_LOW_RANK_H

#include "epilogue.h"
#include "foredraft.h"
#include "linear.h"
#include "team.h"

INLINE change change_of(const fd_adapted *rows, int layer, int product) {
    if (!rows || !(rows->products >> product & 1)) return NO_CHANGE;
    return (change){.rows = rows, .layer = layer, .product = product};
}

INLINE int count_places(const change *c) { return c->rows ? c->rows->num_places : 0; }

/* Where the input of A of a place is. The rows of a group follow each other, as a product reads them. */
INLINE char *find_input(const change *c, int place) {
    int first = c->rows->group[place];
    return c->rows->input + first * c->rows->input_bytes + (place - first) * row_bytes(&find_low_rank(c, place)->a);
}

/* Computes A x of all places, whose inputs are converted. Work items are panels of one group. */
static void multiply_places(fd_team *team, const change *c) {
    const fd_adapted *r = c->rows;
    if (!r) return;
    int panels = (r->max_rank + FD_PANEL - 1) / FD_PANEL;
    FOR_EACH_ITEM(i, r->num_groups * panels) {
        int first = r->first[i / panels], panel = i % panels;
        const fd_weight *a = &find_low_rank(c, first)->a;
        if (panel >= count_panels(a)) continue;
        epilogue e = {.mode = EPILOGUE_STORE, .n = a->n, .stride = r->max_rank, .scale = 1.0f,
                      .out = r->inner + (long)first * r->max_rank};
        multiply_range(a, find_input(c, first), r->first[i / panels + 1] - first, panel, panel + 1, &e);
    }
    fd_barrier(team);
}

#endif
