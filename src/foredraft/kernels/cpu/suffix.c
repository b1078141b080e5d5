/* Suffix automaton with counts. kernels/automaton.py explains it and is its slow reference, with equal bits. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CONTEXTS = 6, SCANNED = 16, MOST = 64, LONGEST = 64 };
#define LEAST 0.02 /* remaining probability below which no shorter context is read */
#define FEW 12 /* up to so many continuations of a state are searched linearly; more are in the hash table */
#define NONE -1

typedef struct {
    int32_t length, link, first, total, kinds;
} fd_state;

typedef struct {
    int32_t token, target, count, next, previous; /* a continuation of a state; the list has the latest first */
} fd_edge;

typedef struct {
    int32_t state, edge; /* edge NONE = free */
} fd_slot;

typedef struct {
    fd_state *states;
    fd_edge *edges;
    fd_slot *slots;
    int64_t num_states, room_states, num_edges, room_edges, num_slots, used_slots, work;
    int32_t last, is_broken;
} fd_suffix;

typedef struct {
    const fd_suffix *text;
    int32_t state, length;
} fd_place;

typedef struct {
    const double *trust;
    const int32_t *ends;
    double bar;
    int32_t nodes, depth, width, num_ends;
} fd_shape;

/* Functions that fail for lack of memory or of indices return NONE; the automaton is then unusable. */

static int grown(void **what, int64_t *room, int64_t needed, size_t size) {
    if (needed <= *room) return 0;
    int64_t more = *room + *room / 2 + 16;
    if (more < needed) more = needed;
    if (more > INT32_MAX - 1) more = INT32_MAX - 1;
    if (more < needed) return NONE;
    void *moved = realloc(*what, (size_t)more * size);
    if (!moved) return NONE;
    *what = moved;
    *room = more;
    return 0;
}

static uint64_t place_of(int32_t state, int32_t token) {
    uint64_t x = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    return x ^ x >> 29;
}

static void put(fd_suffix *s, int32_t state, int32_t edge) {
    uint64_t mask = (uint64_t)s->num_slots - 1, i = place_of(state, s->edges[edge].token) & mask;
    while (s->slots[i].edge != NONE) i = (i + 1) & mask;
    s->slots[i] = (fd_slot){state, edge};
}

static int tabled(fd_suffix *s, int32_t state, int32_t edge) {
    if (2 * (s->used_slots + 1) > s->num_slots) {
        fd_slot *old = s->slots;
        int64_t had = s->num_slots, now = had ? 2 * had : 64;
        fd_slot *fresh = malloc((size_t)now * sizeof *fresh);
        if (!fresh) return NONE;
        memset(fresh, 0xff, (size_t)now * sizeof *fresh);
        s->slots = fresh;
        s->num_slots = now;
        for (int64_t i = 0; i < had; i++)
            if (old[i].edge != NONE) put(s, old[i].state, old[i].edge);
        free(old);
    }
    put(s, state, edge);
    s->used_slots++;
    return 0;
}

static int32_t find(const fd_suffix *s, int32_t state, int32_t token) {
    const fd_state *at = s->states + state;
    if (at->kinds <= FEW) {
        int32_t e = at->first;
        while (e != NONE && s->edges[e].token != token) e = s->edges[e].next;
        return e;
    }
    uint64_t mask = (uint64_t)s->num_slots - 1, i = place_of(state, token) & mask;
    while (s->slots[i].edge != NONE) {
        if (s->slots[i].state == state && s->edges[s->slots[i].edge].token == token) return s->slots[i].edge;
        i = (i + 1) & mask;
    }
    return NONE;
}

static void to_front(fd_suffix *s, int32_t state, int32_t edge) {
    fd_edge *e = s->edges + edge;
    int32_t first = s->states[state].first;
    e->previous = NONE;
    e->next = first;
    if (first != NONE) s->edges[first].previous = edge;
    s->states[state].first = edge;
}

static int add_edge(fd_suffix *s, int32_t state, int32_t token, int32_t target, int32_t count) {
    if (grown((void **)&s->edges, &s->room_edges, s->num_edges + 1, sizeof *s->edges)) return NONE;
    int32_t edge = (int32_t)s->num_edges++;
    s->edges[edge] = (fd_edge){token, target, count, NONE, NONE};
    to_front(s, state, edge);
    fd_state *at = s->states + state;
    at->total += count;
    at->kinds++;
    if (at->kinds == FEW + 1) {
        for (int32_t e = at->first; e != NONE; e = s->edges[e].next)
            if (tabled(s, state, e)) return NONE;
    } else if (at->kinds > FEW) {
        return tabled(s, state, edge);
    }
    return 0;
}

static int32_t add_state(fd_suffix *s, int32_t length, int32_t link) {
    if (grown((void **)&s->states, &s->room_states, s->num_states + 1, sizeof *s->states)) return NONE;
    s->states[s->num_states] = (fd_state){length, link, NONE, 0, 0};
    return (int32_t)s->num_states++;
}

/* Copies the continuations of one state to another, in the same order. */
static int copy_edges(fd_suffix *s, int32_t from, int32_t to) {
    int32_t e = s->states[from].first;
    while (e != NONE && s->edges[e].next != NONE) e = s->edges[e].next;
    for (; e != NONE; e = s->edges[e].previous) { /* edges may move in memory, their indices do not */
        fd_edge one = s->edges[e];
        if (add_edge(s, to, one.token, one.target, one.count)) return NONE;
        s->work++;
    }
    return 0;
}

static void count_again(fd_suffix *s, int32_t state, int32_t edge) {
    fd_edge *e = s->edges + edge;
    s->states[state].total++;
    e->count++;
    if (e->previous == NONE) return;
    s->edges[e->previous].next = e->next;
    if (e->next != NONE) s->edges[e->next].previous = e->previous;
    to_front(s, state, edge);
}

static int32_t split(fd_suffix *s, int32_t here, int32_t token, int32_t after) {
    int32_t part = add_state(s, s->states[here].length + 1, s->states[after].link);
    if (part == NONE || copy_edges(s, after, part)) return NONE;
    while (here != NONE) {
        int32_t e = find(s, here, token);
        if (e == NONE || s->edges[e].target != after) break;
        s->edges[e].target = part;
        here = s->states[here].link;
        s->work++;
    }
    s->states[after].link = part;
    return part;
}

static int append(fd_suffix *s, int32_t token) {
    int32_t here = s->last, edge = NONE, fresh = add_state(s, s->states[s->last].length + 1, 0);
    if (fresh == NONE) return NONE;
    while (here != NONE && (edge = find(s, here, token)) == NONE) {
        if (add_edge(s, here, token, fresh, 1)) return NONE;
        here = s->states[here].link;
        s->work++;
    }
    if (here != NONE) {
        count_again(s, here, edge);
        int32_t after = s->edges[edge].target;
        int is_whole = s->states[after].length == s->states[here].length + 1;
        int32_t link = is_whole ? after : split(s, here, token, after);
        if (link == NONE) return NONE;
        s->states[fresh].link = link;
    }
    s->last = fresh;
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
    for (int64_t i = 0; i < count && !s->is_broken; i++) s->is_broken = append(s, tokens[i]) != 0;
    return s->is_broken;
}

int64_t fd_suffix_bytes(const fd_suffix *s) {
    return s->room_states * (int64_t)sizeof(fd_state) + s->room_edges * (int64_t)sizeof(fd_edge) +
           s->num_slots * (int64_t)sizeof(fd_slot);
}

int64_t fd_suffix_work(const fd_suffix *s) { return s->work; }

void fd_suffix_end(const fd_suffix *s, fd_place *place) {
    int32_t link = s->states[s->last].link;
    place->text = s;
    place->state = link == NONE ? 0 : link;
    place->length = s->states[place->state].length;
}

static void step(fd_place *place, int32_t token) {
    const fd_suffix *s = place->text;
    int32_t here = place->state, length = place->length, edge;
    while ((edge = find(s, here, token)) == NONE) {
        here = s->states[here].link;
        if (here == NONE) {
            place->state = place->length = 0;
            return;
        }
        length = s->states[here].length;
    }
    place->state = s->edges[edge].target;
    place->length = length + 1;
}

void fd_suffix_follow(fd_place *places, int32_t num, const int32_t *tokens, int64_t count) {
    for (int32_t i = 0; i < num; i++)
        for (int64_t t = 0; t < count; t++) step(places + i, tokens[t]);
}

typedef struct {
    int32_t tokens[MOST];
    double chances[MOST];
    int32_t size;
} fd_probs;

static void weigh(fd_probs *dist, int32_t token, double chance) {
    for (int32_t i = 0; i < dist->size; i++)
        if (dist->tokens[i] == token) {
            dist->chances[i] += chance;
            return;
        }
    if (dist->size == MOST) return;
    dist->tokens[dist->size] = token;
    dist->chances[dist->size++] = chance;
}

/* Sorts the `count` likeliest to the front, falling; of equal ones the first found comes first. */
static void sort(fd_probs *dist, int32_t count) {
    for (int32_t i = 0; i < dist->size && i < count; i++) {
        int32_t best = i, token;
        for (int32_t j = i + 1; j < dist->size; j++)
            if (dist->chances[j] > dist->chances[best]) best = j;
        double chance = dist->chances[best];
        token = dist->tokens[best];
        memmove(dist->tokens + i + 1, dist->tokens + i, (size_t)(best - i) * sizeof token);
        memmove(dist->chances + i + 1, dist->chances + i, (size_t)(best - i) * sizeof chance);
        dist->tokens[i] = token;
        dist->chances[i] = chance;
    }
}

/* Modifies `places`. */
static void blend(fd_place *places, int32_t num, const double *trust, fd_probs *dist) {
    double weight = 1.0;
    dist->size = 0;
    for (int k = 0; k < CONTEXTS && weight >= LEAST; k++) {
        fd_place *p = NULL;
        for (int32_t i = 0; i < num; i++)
            if (!p || places[i].length > p->length) p = places + i;
        if (!p || p->length < 1) break;
        const fd_suffix *s = p->text;
        const fd_state *at = s->states + p->state;
        int32_t length = p->length < LONGEST ? p->length : LONGEST, shorter = s->states[at->link].length;
        p->state = at->link;
        p->length = shorter;
        if (!at->total) continue;
        double discount = trust[length] / trust[shorter < length ? shorter : length - 1], share = weight / at->total;
        int32_t e = at->first;
        for (int i = 0; i < SCANNED && e != NONE; i++, e = s->edges[e].next)
            if (s->edges[e].token >= 0) weigh(dist, s->edges[e].token, share * (s->edges[e].count - discount));
        weight *= discount * at->kinds / at->total;
    }
}

int32_t fd_suffix_probs(fd_place *places, int32_t num, const double *trust, int32_t *tokens, double *chances) {
    fd_probs dist;
    blend(places, num, trust, &dist);
    sort(&dist, dist.size);
    memcpy(tokens, dist.tokens, (size_t)dist.size * sizeof *tokens);
    memcpy(chances, dist.chances, (size_t)dist.size * sizeof *chances);
    return dist.size;
}

typedef struct {
    double chance;
    int32_t parent, token;
} fd_open;

typedef struct {
    fd_place *at; /* [nodes + 1, num], and one spare row */
    fd_open *open;
    int32_t *depths, num_open, num;
} fd_growth;

static int is_end(const fd_shape *shape, int32_t token) {
    for (int32_t i = 0; i < shape->num_ends; i++)
        if (shape->ends[i] == token) return 1;
    return 0;
}

static void look(fd_growth *g, int32_t node, double chance, const fd_shape *shape) {
    fd_place *spare = g->at + (int64_t)(shape->nodes + 1) * g->num;
    fd_probs dist;
    memcpy(spare, g->at + (int64_t)node * g->num, (size_t)g->num * sizeof *spare);
    blend(spare, g->num, shape->trust, &dist);
    sort(&dist, shape->width);
    for (int32_t i = 0; i < dist.size && i < shape->width; i++)
        g->open[g->num_open++] = (fd_open){chance * dist.chances[i], node, dist.tokens[i]};
}

/* Drafts the likeliest nodes below the root. Returns their number, or NONE without memory. Arrays: [shape->nodes]. */
int32_t fd_suffix_draft(
    const fd_place *places, int32_t num, const fd_shape *shape, int32_t *tokens, int32_t *parents, double *chances
) {
    size_t rows = (size_t)shape->nodes + 2, width = shape->width < MOST ? (size_t)shape->width : MOST;
    fd_growth g = {
        malloc(rows * (size_t)num * sizeof *g.at + 1), malloc(rows * width * sizeof *g.open),
        malloc(rows * sizeof *g.depths), 0, num,
    };
    int32_t node = g.at && g.open && g.depths ? 0 : NONE;
    if (node == 0) {
        memcpy(g.at, places, (size_t)num * sizeof *places);
        g.depths[0] = 0;
    }
    while (node != NONE) {
        if (node == shape->nodes) break;
        int is_over = g.depths[node] >= shape->depth || (node && is_end(shape, tokens[node - 1]));
        if (!is_over) look(&g, node, node ? chances[node - 1] : 1.0, shape);
        int32_t best = NONE;
        for (int32_t i = 0; i < g.num_open; i++)
            if (best == NONE || g.open[i].chance > g.open[best].chance) best = i;
        if (best == NONE || g.open[best].chance < shape->bar) break;
        fd_open one = g.open[best];
        memmove(g.open + best, g.open + best + 1, (size_t)(--g.num_open - best) * sizeof one);
        tokens[node] = one.token;
        parents[node] = one.parent;
        chances[node] = one.chance;
        g.depths[++node] = g.depths[one.parent] + 1;
        fd_place *at = g.at + (int64_t)node * num;
        memcpy(at, g.at + (int64_t)one.parent * num, (size_t)num * sizeof *at);
        for (int32_t i = 0; i < num; i++) step(at + i, one.token);
    }
    free(g.at);
    free(g.open);
    free(g.depths);
    return node;
}
