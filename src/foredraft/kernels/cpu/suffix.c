/* Suffix automaton with counts. drafters/suffix/automaton.py explains it and is its slow reference, with equal bits. */
#include "suffix.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_CONTEXTS = 6, MAX_SCANNED = 16, MAX_CONTEXT_LENGTH = 64 };
#define MIN_WEIGHT 0.02 /* remaining probability below which no shorter context is read */
#define MAX_LISTED 12 /* up to so many continuations of a state are searched linearly; more are in the hash table */
#define NONE -1

/* A state of the automaton. `first` is its latest continuation, `total` the sum of their counts. */
typedef struct {
    int32_t length, link, first, total, num_edges;
} fd_state;

/* A continuation of a state, in a list with the latest first. */
typedef struct {
    int32_t token, target, count, next, previous;
} fd_edge;

/* Slot of the hash table of continuations. */
typedef struct {
    int32_t state, edge; /* edge NONE = free */
} fd_slot;

struct fd_suffix {
    fd_state *states;
    fd_edge *edges;
    fd_slot *slots;
    int64_t num_states, state_capacity, num_edges, edge_capacity, num_slots, num_used_slots, num_operations;
    int32_t last, is_broken;
};

typedef struct {
    const double *discounts;
    const int32_t *end_ids;
    double min_probability;
    int32_t max_nodes, max_depth, width, num_end_ids;
} fd_draft_spec;

/* Functions that fail for lack of memory or of indices return NONE; the automaton is then unusable. */

static int reserve(void **array, int64_t *capacity, int64_t needed, size_t size) {
    if (needed <= *capacity) return 0;
    int64_t new_capacity = *capacity + *capacity / 2 + 16;
    if (new_capacity < needed) new_capacity = needed;
    if (new_capacity > INT32_MAX - 1) new_capacity = INT32_MAX - 1;
    if (new_capacity < needed) return NONE;
    void *new_array = realloc(*array, (size_t)new_capacity * size);
    if (!new_array) return NONE;
    *array = new_array;
    *capacity = new_capacity;
    return 0;
}

static uint64_t hash_edge(int32_t state, int32_t token) {
    uint64_t x = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    return x ^ x >> 29;
}

static void insert_slot(fd_suffix *s, int32_t state, int32_t edge) {
    uint64_t mask = (uint64_t)s->num_slots - 1, i = hash_edge(state, s->edges[edge].token) & mask;
    while (s->slots[i].edge != NONE) i = (i + 1) & mask;
    s->slots[i] = (fd_slot){state, edge};
}

static int insert_hash(fd_suffix *s, int32_t state, int32_t edge) {
    if (2 * (s->num_used_slots + 1) > s->num_slots) {
        fd_slot *old = s->slots;
        int64_t old_size = s->num_slots, new_size = old_size ? 2 * old_size : 64;
        fd_slot *new_slots = malloc((size_t)new_size * sizeof *new_slots);
        if (!new_slots) return NONE;
        memset(new_slots, 0xff, (size_t)new_size * sizeof *new_slots);
        s->slots = new_slots;
        s->num_slots = new_size;
        for (int64_t i = 0; i < old_size; i++)
            if (old[i].edge != NONE) insert_slot(s, old[i].state, old[i].edge);
        free(old);
    }
    insert_slot(s, state, edge);
    s->num_used_slots++;
    return 0;
}

static int32_t find_edge(const fd_suffix *s, int32_t state, int32_t token) {
    const fd_state *entry = s->states + state;
    if (entry->num_edges <= MAX_LISTED) {
        int32_t e = entry->first;
        while (e != NONE && s->edges[e].token != token) e = s->edges[e].next;
        return e;
    }
    uint64_t mask = (uint64_t)s->num_slots - 1, i = hash_edge(state, token) & mask;
    while (s->slots[i].edge != NONE) {
        if (s->slots[i].state == state && s->edges[s->slots[i].edge].token == token) return s->slots[i].edge;
        i = (i + 1) & mask;
    }
    return NONE;
}

static void move_to_front(fd_suffix *s, int32_t state, int32_t edge) {
    fd_edge *e = s->edges + edge;
    int32_t first = s->states[state].first;
    e->previous = NONE;
    e->next = first;
    if (first != NONE) s->edges[first].previous = edge;
    s->states[state].first = edge;
}

static int add_edge(fd_suffix *s, int32_t state, int32_t token, int32_t target, int32_t count) {
    if (reserve((void **)&s->edges, &s->edge_capacity, s->num_edges + 1, sizeof *s->edges)) return NONE;
    int32_t edge = (int32_t)s->num_edges++;
    s->edges[edge] = (fd_edge){token, target, count, NONE, NONE};
    move_to_front(s, state, edge);
    fd_state *entry = s->states + state;
    entry->total += count;
    entry->num_edges++;
    if (entry->num_edges == MAX_LISTED + 1) {
        for (int32_t e = entry->first; e != NONE; e = s->edges[e].next)
            if (insert_hash(s, state, e)) return NONE;
    } else if (entry->num_edges > MAX_LISTED) {
        return insert_hash(s, state, edge);
    }
    return 0;
}

static int32_t add_state(fd_suffix *s, int32_t length, int32_t link) {
    if (reserve((void **)&s->states, &s->state_capacity, s->num_states + 1, sizeof *s->states)) return NONE;
    s->states[s->num_states] = (fd_state){length, link, NONE, 0, 0};
    return (int32_t)s->num_states++;
}

/* Copies the continuations of one state to another, in the same order. */
static int copy_edges(fd_suffix *s, int32_t from, int32_t to) {
    int32_t e = s->states[from].first;
    while (e != NONE && s->edges[e].next != NONE) e = s->edges[e].next;
    for (; e != NONE; e = s->edges[e].previous) { /* edges may move in memory, their indices do not */
        fd_edge edge_copy = s->edges[e];
        if (add_edge(s, to, edge_copy.token, edge_copy.target, edge_copy.count)) return NONE;
        s->num_operations++;
    }
    return 0;
}

static void increment(fd_suffix *s, int32_t state, int32_t edge) {
    fd_edge *e = s->edges + edge;
    s->states[state].total++;
    e->count++;
    if (e->previous == NONE) return;
    s->edges[e->previous].next = e->next;
    if (e->next != NONE) s->edges[e->next].previous = e->previous;
    move_to_front(s, state, edge);
}

static int32_t clone_state(fd_suffix *s, int32_t state, int32_t token, int32_t target) {
    int32_t clone = add_state(s, s->states[state].length + 1, s->states[target].link);
    if (clone == NONE || copy_edges(s, target, clone)) return NONE;
    while (state != NONE) {
        int32_t e = find_edge(s, state, token);
        if (e == NONE || s->edges[e].target != target) break;
        s->edges[e].target = clone;
        state = s->states[state].link;
        s->num_operations++;
    }
    s->states[target].link = clone;
    return clone;
}

static int append_token(fd_suffix *s, int32_t token) {
    int32_t state = s->last, edge = NONE, new_state = add_state(s, s->states[s->last].length + 1, 0);
    if (new_state == NONE) return NONE;
    while (state != NONE && (edge = find_edge(s, state, token)) == NONE) {
        if (add_edge(s, state, token, new_state, 1)) return NONE;
        state = s->states[state].link;
        s->num_operations++;
    }
    if (state != NONE) {
        increment(s, state, edge);
        int32_t target = s->edges[edge].target;
        int is_whole = s->states[target].length == s->states[state].length + 1;
        int32_t link = is_whole ? target : clone_state(s, state, token, target);
        if (link == NONE) return NONE;
        s->states[new_state].link = link;
    }
    s->last = new_state;
    return 0;
}

fd_suffix *fd_suffix_new(void) {
    fd_suffix *s = calloc(1, sizeof *s);
    if (s && add_state(s, 0, NONE) == NONE) {
        free(s);
        return NULL;
    }
    return s;
}

void fd_suffix_free(fd_suffix *s) {
    free(s->states);
    free(s->edges);
    free(s->slots);
    free(s);
}

/* Returns 0, or 1 without memory or indices for more tokens. */
int fd_suffix_extend(fd_suffix *s, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count && !s->is_broken; i++) s->is_broken = append_token(s, tokens[i]) != 0;
    return s->is_broken;
}

int64_t fd_suffix_num_bytes(const fd_suffix *s) {
    return s->state_capacity * (int64_t)sizeof(fd_state) + s->edge_capacity * (int64_t)sizeof(fd_edge) +
           s->num_slots * (int64_t)sizeof(fd_slot);
}

int64_t fd_suffix_num_operations(const fd_suffix *s) { return s->num_operations; }

void fd_suffix_match_end(const fd_suffix *s, fd_match *match) {
    int32_t link = s->states[s->last].link;
    match->text = s;
    match->state = link == NONE ? 0 : link;
    match->length = s->states[match->state].length;
}

static void advance_match(fd_match *match, int32_t token) {
    const fd_suffix *s = match->text;
    int32_t state = match->state, length = match->length, edge;
    while ((edge = find_edge(s, state, token)) == NONE) {
        state = s->states[state].link;
        if (state == NONE) {
            match->state = match->length = 0;
            return;
        }
        length = s->states[state].length;
    }
    match->state = s->edges[edge].target;
    match->length = length + 1;
}

void fd_suffix_advance(fd_match *matches, int32_t num, const int32_t *tokens, int64_t count) {
    for (int32_t i = 0; i < num; i++)
        for (int64_t t = 0; t < count; t++) advance_match(matches + i, tokens[t]);
}

typedef struct {
    int32_t tokens[MAX_CONTINUATIONS];
    double probs[MAX_CONTINUATIONS];
    int32_t size;
} fd_distribution;

static void add_prob(fd_distribution *d, int32_t token, double prob) {
    for (int32_t i = 0; i < d->size; i++)
        if (d->tokens[i] == token) {
            d->probs[i] += prob;
            return;
        }
    if (d->size == MAX_CONTINUATIONS) return;
    d->tokens[d->size] = token;
    d->probs[d->size++] = prob;
}

/* Sorts the `count` likeliest to the front, falling; of equal ones the first found comes first. */
static void sort_by_prob(fd_distribution *d, int32_t count) {
    for (int32_t i = 0; i < d->size && i < count; i++) {
        int32_t best = i, token;
        for (int32_t j = i + 1; j < d->size; j++)
            if (d->probs[j] > d->probs[best]) best = j;
        double prob = d->probs[best];
        token = d->tokens[best];
        memmove(d->tokens + i + 1, d->tokens + i, (size_t)(best - i) * sizeof token);
        memmove(d->probs + i + 1, d->probs + i, (size_t)(best - i) * sizeof prob);
        d->tokens[i] = token;
        d->probs[i] = prob;
    }
}

/* Blends the contexts of all matches, the longest first. Modifies `matches`. */
static void blend_contexts(fd_match *matches, int32_t num, const double *discounts, fd_distribution *d) {
    double weight = 1.0;
    d->size = 0;
    for (int k = 0; k < MAX_CONTEXTS && weight >= MIN_WEIGHT; k++) {
        fd_match *p = NULL;
        for (int32_t i = 0; i < num; i++)
            if (!p || matches[i].length > p->length) p = matches + i;
        if (!p || p->length < 1) break;
        const fd_suffix *s = p->text;
        const fd_state *entry = s->states + p->state;
        int32_t length = p->length < MAX_CONTEXT_LENGTH ? p->length : MAX_CONTEXT_LENGTH;
        int32_t shorter = s->states[entry->link].length;
        p->state = entry->link;
        p->length = shorter;
        if (!entry->total) continue;
        double discount = discounts[length] / discounts[shorter < length ? shorter : length - 1];
        double scale = weight / entry->total;
        int32_t e = entry->first;
        for (int i = 0; i < MAX_SCANNED && e != NONE; i++, e = s->edges[e].next)
            if (s->edges[e].token >= 0) add_prob(d, s->edges[e].token, scale * (s->edges[e].count - discount));
        weight *= discount * entry->num_edges / entry->total;
    }
}

int32_t fd_suffix_predict(fd_match *matches, int32_t num, const double *discounts, int32_t *tokens, double *probs) {
    fd_distribution d;
    blend_contexts(matches, num, discounts, &d);
    sort_by_prob(&d, d.size);
    memcpy(tokens, d.tokens, (size_t)d.size * sizeof *tokens);
    memcpy(probs, d.probs, (size_t)d.size * sizeof *probs);
    return d.size;
}

typedef struct {
    double prob;
    int32_t parent, token;
} fd_candidate;

typedef struct {
    fd_match *matches; /* [max_nodes + 1, num], and one scratch row */
    fd_candidate *candidates;
    int32_t *depths, num_candidates, num;
} fd_draft;

static int is_end(const fd_draft_spec *spec, int32_t token) {
    for (int32_t i = 0; i < spec->num_end_ids; i++)
        if (spec->end_ids[i] == token) return 1;
    return 0;
}

static void expand(fd_draft *draft, int32_t node, double prob, const fd_draft_spec *spec) {
    fd_match *scratch_matches = draft->matches + (int64_t)(spec->max_nodes + 1) * draft->num;
    fd_distribution d;
    memcpy(scratch_matches, draft->matches + (int64_t)node * draft->num, (size_t)draft->num * sizeof *scratch_matches);
    blend_contexts(scratch_matches, draft->num, spec->discounts, &d);
    sort_by_prob(&d, spec->width);
    for (int32_t i = 0; i < d.size && i < spec->width; i++)
        draft->candidates[draft->num_candidates++] = (fd_candidate){prob * d.probs[i], node, d.tokens[i]};
}

/* Drafts the likeliest nodes below the root. Returns their number, or NONE without memory. Arrays: [max_nodes]. */
int32_t fd_suffix_draft(
    const fd_match *matches, int32_t num, const fd_draft_spec *spec, int32_t *tokens, int32_t *parents, double *probs
) {
    size_t rows = (size_t)spec->max_nodes + 2;
    size_t width = spec->width < MAX_CONTINUATIONS ? (size_t)spec->width : MAX_CONTINUATIONS;
    fd_draft draft = {
        malloc(rows * (size_t)num * sizeof *draft.matches + 1), malloc(rows * width * sizeof *draft.candidates),
        malloc(rows * sizeof *draft.depths), 0, num,
    };
    int32_t node = draft.matches && draft.candidates && draft.depths ? 0 : NONE;
    if (node == 0) {
        memcpy(draft.matches, matches, (size_t)num * sizeof *matches);
        draft.depths[0] = 0;
    }
    while (node != NONE) {
        if (node == spec->max_nodes) break;
        int is_leaf = draft.depths[node] >= spec->max_depth || (node && is_end(spec, tokens[node - 1]));
        if (!is_leaf) expand(&draft, node, node ? probs[node - 1] : 1.0, spec);
        int32_t best = NONE;
        for (int32_t i = 0; i < draft.num_candidates; i++)
            if (best == NONE || draft.candidates[i].prob > draft.candidates[best].prob) best = i;
        if (best == NONE || draft.candidates[best].prob < spec->min_probability) break;
        fd_candidate candidate = draft.candidates[best];
        fd_candidate *at = draft.candidates + best;
        memmove(at, at + 1, (size_t)(--draft.num_candidates - best) * sizeof candidate);
        tokens[node] = candidate.token;
        parents[node] = candidate.parent;
        probs[node] = candidate.prob;
        draft.depths[++node] = draft.depths[candidate.parent] + 1;
        fd_match *child = draft.matches + (int64_t)node * num;
        memcpy(child, draft.matches + (int64_t)candidate.parent * num, (size_t)num * sizeof *child);
        for (int32_t i = 0; i < num; i++) advance_match(child + i, candidate.token);
    }
    free(draft.matches);
    free(draft.candidates);
    free(draft.depths);
    return node;
}
