/* The last layer of a decoder-only model, from its keys and values on: rows without logits end there.
 *
 * Most rows of a prompt have no logits. Rows do not depend on each other after the keys and values are stored, so the
 * bits of those that go on stay the same.
 */
#ifndef FD_NARROW_H
#define FD_NARROW_H

#include "decoder.h"

/* Whether the states of rows without logits are not read after `layers` layers, and leaving them out pays. */
static int can_narrow(const decoder *d, int layers) {
    const fd_rows *rows = d->rows;
    const fd_pass *p = d->pass;
    if (2 * rows->num_logits > rows->num_rows || p->adapted || p->images) return 0;
    for (int i = 0; i < p->hidden_layer_count && !p->reads_logit_rows; i++)
        if (p->hidden_layers[i] >= layers || p->hidden_layers[i] == FD_AFTER_FINAL_NORM) return 0;
    for (int i = 1; i < rows->num_logits; i++)
        if (rows->logit_rows[i] <= rows->logit_rows[i - 1]) return 0;
    return 1;
}

static void move_row(float *buffer, long width, int from, int to) {
    if (from != to) memcpy(buffer + to * width, buffer + from * width, sizeof(float) * (size_t)width);
}

static const int32_t *select_entries(const int32_t *list, const int32_t *chosen, int count, int32_t **to) {
    int32_t *selected = *to;
    for (int i = 0; i < count; i++) selected[i] = list[chosen[i]];
    *to += count;
    return selected;
}

/* Moves the rows with logits to the front of the buffers, and returns their description; logit_rows is 0, 1, ... */
static fd_rows narrow_rows(const decoder *d) {
    const fd_rows *all = d->rows;
    const int32_t *chosen = all->logit_rows;
    int count = all->num_logits;
    int32_t *to = d->lists;
    fd_rows rows = *all;
    rows.num_rows = count;
    rows.page_offset = select_entries(all->page_offset, chosen, count, &to);
    rows.path_offset = select_entries(all->path_offset, chosen, count, &to);
    rows.num_committed = select_entries(all->num_committed, chosen, count, &to);
    rows.path_length = select_entries(all->path_length, chosen, count, &to);
    rows.logit_rows = to;
    for (int i = 0; i < count; i++) {
        to[i] = i;
        move_row(d->hidden, d->shape.hidden, chosen[i], i);
        move_row(d->attention, attention_width(&d->shape), chosen[i], i);
        if (d->shape.gate_width) move_row(d->qkv, qkv_width(&d->shape), chosen[i], i); /* gates of attention */
    }
    return rows;
}

#endif
