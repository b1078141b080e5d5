/* Verification of drafts by the target's probabilities. verification/rules.py is the reference, with the same bits. */
#ifndef FD_TREE_WALK_H
#define FD_TREE_WALK_H

#include "masses.h"
#include "race.h"
#include "sampler.h"

enum { SAMPLES = 1, TRIALS = 2, CHAIN = 3 };                         /* kernels/tree_walk.py */
enum { TOKEN_STREAM = 0, ACCEPT_STREAM = 1, RESIDUAL_STREAM = 2 }; /* sampling/rng.py */
/* How the children of a node were proposed: sampled from q, without a q, or from a q that is no distribution. */
enum { SAMPLED_DRAFT, FIXED_DRAFT, INVALID_DRAFT };
enum { UNCERTAIN_PATH = -1 };
static const double BOUND_SLACK = 1e-9;              /* verification/block_chain.py */

/* Masses of some tokens in ascending order, or of all tokens; `Probs` in verification/probs.py. */
typedef struct {
    double *mass; /* [n] */
    int64_t *ids; /* [n] if is_sparse */
    int64_t n;
    int is_sparse;
} distribution;

/* One request, and the scratch of the member that walks. */
typedef struct {
    const fd_walks *job;
    const fd_walk_request *request;
    fd_sampling sampling; /* what the sampler reads of a job */
    sampler s;
    distribution p, kept, q;
    const float *q_row; /* dense masses of q that were not copied into `q`; NULL = they are there */
    double q_total;     /* sum of the masses of q in a trial */
    double *gathered, *sums;
    double *chain_q; /* [most rows of a request] probabilities of the tokens of a chain */
} walker;

enum { WALK_ARRAYS = 8 }; /* of [V] numbers of 8 bytes: three distributions, `gathered`, `sums` */

INLINE int64_t walk_array_bytes(int vocab) { return ((int64_t)vocab * 8 + 63) / 64 * 64; }

static void place_distribution(distribution *d, int vocab, char **scratch) {
    d->mass = take_scratch(scratch, walk_array_bytes(vocab));
    d->ids = take_scratch(scratch, walk_array_bytes(vocab));
}

/* Gives a walker the scratch memory of the calling thread. Returns 0 without memory. */
static int set_up_walker(walker *w, const fd_walks *job) {
    const int vocab = job->vocab;
    int64_t most_rows = 0;
    for (int b = 0; b < job->num_requests; b++)
        if (job->requests[b].num_rows > most_rows) most_rows = job->requests[b].num_rows;
    char *scratch = fd_thread_memory(sampler_scratch(vocab) + WALK_ARRAYS * walk_array_bytes(vocab) + most_rows * 8);
    if (!scratch) return 0;
    w->job = job;
    w->sampling = (fd_sampling){
        .logits = job->logits, .stride = job->stride, .margin = job->margin, .vocab = vocab, .is_bf16 = job->is_bf16};
    w->s = (sampler){.job = &w->sampling};
    place_sampler(&w->s, vocab, &scratch);
    place_distribution(&w->p, vocab, &scratch);
    place_distribution(&w->kept, vocab, &scratch);
    place_distribution(&w->q, vocab, &scratch);
    w->gathered = take_scratch(&scratch, walk_array_bytes(vocab));
    w->sums = take_scratch(&scratch, walk_array_bytes(vocab));
    w->chain_q = take_scratch(&scratch, most_rows * 8);
    return 1;
}

INLINE uint64_t extend_key(uint64_t key, int64_t counter) { return mix(key + (uint64_t)(counter + 1) * GOLDEN); }

/* Key of a stream of a request's random numbers; sampling/rng.py is the reference. */
INLINE uint64_t start_key(const fd_walk_request *r, int stream) {
    return extend_key(extend_key(mix(r->seed + GOLDEN), (int64_t)r->sample_index), stream);
}

/* Uniform random number of a node in (0, 1), of the request's key, stream and position. */
static double make_uniform(const fd_walk_request *r, int stream, int node) {
    uint64_t key = extend_key(extend_key(start_key(r, stream), r->position), node);
    return (double)(key >> 12) * 0x1p-52 + 0x1p-53;
}

/* Index of a token's mass; -1 = it has none. */
static int64_t find_index(const distribution *d, int64_t token) {
    if (!d->is_sparse) return token;
    int64_t low = 0, high = d->n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (d->ids[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low < d->n && d->ids[low] == token ? low : -1;
}

INLINE double find_mass(const distribution *d, int64_t token) {
    int64_t i = find_index(d, token);
    return i < 0 ? 0 : d->mass[i];
}

/* Samples a token; masses as in verification/masses.py. */
static int32_t sample_token(walker *w, const distribution *d, int node) {
    int64_t i = sample_mass(d->mass, d->n, make_uniform(w->request, RESIDUAL_STREAM, node), w->sums);
    return (int32_t)(d->is_sparse ? d->ids[i] : i);
}

/* Reads p after a node. Returns 0 if its logits are invalid. */
static int read_target(walker *w, int node) {
    if (!read_row(&w->s, w->request->first_row + node)) return 0;
    w->sampling.masses = w->p.mass; /* so that `filter` lists all tokens that it keeps */
    filter(&w->s, &w->request->settings);
    int32_t count = write_masses(&w->s, w->p.mass, w->p.ids);
    w->p.is_sparse = count >= 0;
    w->p.n = count >= 0 ? count : w->job->vocab;
    return 1;
}

/* Reads the row of q after a node. Returns how the children of the node were proposed. */
static int read_draft(walker *w, int node) {
    if (!w->job->q) return FIXED_DRAFT;
    const int vocab = w->job->vocab;
    const float *row = w->job->q + (w->request->first_row + node) * w->job->q_stride;
    distribution *q = &w->q;
    int count = 0, negative = 0;
    for (int i = 0; i < vocab; i++) count += row[i] != 0, negative += row[i] < 0;
    if (!count) return FIXED_DRAFT;
    q->is_sparse = (int64_t)count * SPARSE_FACTOR < vocab;
    q->n = q->is_sparse ? 0 : vocab;
    w->q_row = q->is_sparse ? NULL : row;
    if (q->is_sparse)
        for (int i = 0; i < vocab; i++)
            if (row[i] != 0) q->ids[q->n] = i, q->mass[q->n++] = row[i];
    return negative ? INVALID_DRAFT : SAMPLED_DRAFT;
}

/* Begins a trial of a sample. Returns the token's probability; 0 if q is no distribution that has this token. */
static double begin_trial(walker *w, int64_t token) {
    double total = w->q_row ? sum_masses(w->q_row, 1, w->q.n) : sum_masses(w->q.mass, 0, w->q.n);
    if (token >= w->job->vocab || !isfinite(total) || !(total > 0)) return 0;
    double mass = w->q_row ? w->q_row[token] : find_mass(&w->q, token);
    w->q_total = total;
    return mass > 0 ? mass / total : 0;
}

/* Begins a trial of a token that was not sampled. Returns its probability; 0 outside the vocabulary. */
static double begin_fixed_trial(walker *w, int64_t token) {
    w->q = (distribution){w->q.mass, w->q.ids, 1, 1};
    w->q.ids[0] = token;
    w->q.mass[0] = 1;
    w->q_row = NULL;
    w->q_total = 1;
    return token < w->job->vocab;
}

/* Divides the masses of q by their sum: a trial that accepts its token reads only one of them. */
static void normalise_draft(walker *w) {
    const void *masses = w->q_row ? (const void *)w->q_row : w->q.mass;
    divide_masses(masses, w->q_row != NULL, w->q.n, w->q_total, w->q.mass);
    w->q_row = NULL;
}

/* Returns the probabilities of q for the tokens of p, written into `gathered` if they are not those of q in order. */
static const double *gather_draft(walker *w, const distribution *p) {
    const distribution *q = &w->q;
    double *out = w->gathered;
    if (!p->is_sparse && !q->is_sparse) return q->mass;
    if (p->is_sparse) {
        for (int64_t i = 0, j = 0; i < p->n; i++) {
            while (q->is_sparse && j < q->n && q->ids[j] < p->ids[i]) j++;
            if (q->is_sparse) out[i] = j < q->n && q->ids[j] == p->ids[i] ? q->mass[j] : 0;
            else out[i] = q->mass[p->ids[i]];
        }
    } else {
        memset(out, 0, (size_t)p->n * sizeof *out);
        for (int64_t i = 0; i < q->n; i++) out[q->ids[i]] = q->mass[i];
    }
    return out;
}

/* Writes the residual max(0, weight * p - q) into `gathered` and returns its mass. */
static double subtract_draft(walker *w, const distribution *p, double weight) {
    normalise_draft(w);
    subtract_masses(p->mass, weight, gather_draft(w, p), p->n, w->gathered);
    return sum_masses(w->gathered, 0, p->n);
}

/* Replaces p by the residual after a rejection, normalised. p stays if rounding leaves the residual without mass. */
static void take_residual(walker *w, distribution *p, double weight) {
    double total = subtract_draft(w, p, weight);
    if (total > 0) divide_masses(w->gathered, 0, p->n, total, p->mass);
}

INLINE int32_t draft_token(const walker *w, int node) { return w->job->tokens[w->request->first_row + node]; }

INLINE int count_sampled(const walker *w, int node) {
    return w->job->num_sampled ? w->job->num_sampled[w->request->first_row + node] : INT32_MAX;
}

/* Returns the first child of a node that its trial accepts. 0 = none: p is the residual of all of them then. */
static int try_children(walker *w, int node) {
    const fd_walk_request *r = w->request;
    const int32_t *parents = w->job->parents + r->first_row;
    int origin = INVALID_DRAFT, sampled = 0, tried = 0; /* sampled: leading children that were sampled from q */
    for (int child = node + 1, last = 0; child < r->num_rows; child++) {
        if (parents[child] != node) continue;
        if (!tried) {
            origin = read_draft(w, node);
            sampled = origin == FIXED_DRAFT ? 0 : count_sampled(w, node);
        } else if (tried < sampled) w->q.mass[find_index(&w->q, draft_token(w, last))] = 0;
        int32_t x = draft_token(w, child);
        if (tried < sampled && origin == INVALID_DRAFT) return 0;
        double q = tried < sampled ? begin_trial(w, x) : begin_fixed_trial(w, x);
        if (!(q > 0)) return 0; /* no correct drafter proposes it: it and the children after it are no drafts */
        if (make_uniform(r, ACCEPT_STREAM, child) * q < find_mass(&w->p, x)) return child;
        take_residual(w, &w->p, 1);
        last = child;
        tried++;
    }
    return 0;
}

/* Returns the first child of a node that has a token; 0 = none. */
static int find_child(const walker *w, int node, int32_t token) {
    const int32_t *parents = w->job->parents + w->request->first_row;
    for (int child = node + 1; child < w->request->num_rows; child++)
        if (parents[child] == node && draft_token(w, child) == token) return child;
    return 0;
}

/* The target's own token after every node. Writes the path and returns its number of nodes; 0 if the logits at the root
 * are invalid, UNCERTAIN_PATH if rounding decides about a token. */
static int32_t walk_samples(walker *w, int32_t *nodes, int32_t *following) {
    const fd_walk_request *r = w->request;
    const uint64_t key = start_key(r, TOKEN_STREAM);
    w->sampling.masses = NULL;
    for (int count = 0, node = 0;;) {
        if (!read_row(&w->s, r->first_row + node)) return count;
        filter(&w->s, &r->settings);
        int32_t token = run_race(&w->s, extend_key(key, r->position + count + 1));
        if (token == UNCERTAIN_TOKEN) return UNCERTAIN_PATH;
        nodes[count] = node;
        following[count++] = token;
        node = find_child(w, node, token);
        if (!node) return count;
    }
}

/* Speculative sampling: as walk_samples. */
static int32_t walk_trials(walker *w, int32_t *nodes, int32_t *following) {
    for (int count = 0, node = 0;; count++) {
        if (!read_target(w, node)) return count;
        nodes[count] = node;
        int child = try_children(w, node);
        following[count] = child ? draft_token(w, child) : sample_token(w, &w->p, node);
        if (!child) return count + 1;
        node = child;
    }
}

/* Makes q the distribution of the draft token after `i` accepted ones. Returns its probability; 0 = it is no draft. */
static double begin_chain_trial(walker *w, int i) {
    int32_t x = draft_token(w, i + 1);
    int origin = read_draft(w, i);
    if (origin == FIXED_DRAFT || !count_sampled(w, i)) return begin_fixed_trial(w, x);
    return origin == SAMPLED_DRAFT ? begin_trial(w, x) : 0;
}

/* Whether a token after `i` accepted ones can pass. p <= 1 bounds its weight. q: [n] probabilities of the drafts. */
static int can_accept_after(const walker *w, int i, double weight, const double *q, int n) {
    double bound = weight * (1 + BOUND_SLACK);
    for (; i < n; i++) {
        bound /= q[i];
        if (make_uniform(w->request, ACCEPT_STREAM, i + 1) < bound) return 1;
    }
    return 0;
}

/* Whether the first `i` tokens pass the joint test, if their uniform is below their weight. */
static int passes_jointly(walker *w, int i, double weight, double uniform) {
    begin_chain_trial(w, i);
    double mass = subtract_draft(w, &w->p, weight);
    return uniform * (mass + 1 - weight) < mass || mass + 1 - weight <= 0;
}

/* Block verification of a chain: as walk_samples. */
static int32_t walk_chain(walker *w, int32_t *nodes, int32_t *following) {
    double *q = w->chain_q, weight = 1, kept_weight = 1;
    int n = 0, accepted = 0, is_open = 0; /* is_open: the logits after the accepted tokens are invalid */
    while (n + 1 < w->request->num_rows && (q[n] = begin_chain_trial(w, n)) > 0) n++;
    for (int i = 0; i <= n; i++) {
        double uniform = make_uniform(w->request, ACCEPT_STREAM, i);
        int can_pass = !i || uniform < weight, goes_on = can_accept_after(w, i, weight, q, n);
        if (!can_pass && !goes_on) break;
        if (!read_target(w, i)) {
            if (!i) return 0;
            if (can_pass) accepted = i, is_open = 1;
            break;
        }
        int passes = can_pass && (!i || i == n || passes_jointly(w, i, weight, uniform));
        double joint = goes_on ? weight * find_mass(&w->p, draft_token(w, i + 1)) / q[i] : 0;
        if (passes) {
            distribution p = w->p;
            w->p = w->kept;
            w->kept = p;
            accepted = i;
            kept_weight = weight;
        }
        if (!goes_on) break;
        weight = joint < 1 ? joint : 1;
    }
    for (int i = 0; i <= accepted; i++) nodes[i] = i, following[i] = i < accepted ? draft_token(w, i + 1) : 0;
    if (is_open) return accepted;
    if (accepted < n) {
        begin_chain_trial(w, accepted);
        take_residual(w, &w->kept, kept_weight);
    }
    following[accepted] = sample_token(w, &w->kept, accepted);
    return accepted + 1;
}

typedef struct {
    const fd_walks *job;
    atomic_int is_out_of_memory;
} walking_team;

static void walking_body(void *arg, fd_team *team) {
    walking_team *t = arg;
    walker w;
    if (!set_up_walker(&w, t->job)) {
        t->is_out_of_memory = 1;
        return;
    }
    FOR_EACH_ITEM(b, t->job->num_requests) {
        w.request = &t->job->requests[b];
        int32_t *nodes = t->job->nodes + w.request->first_row, *following = t->job->following + w.request->first_row;
        int32_t *count = t->job->counts + b;
        *count = 0;
        if (!w.request->num_rows) continue; /* part of a prompt */
        if (w.request->walk == SAMPLES) *count = walk_samples(&w, nodes, following);
        else *count = (w.request->walk == CHAIN ? walk_chain : walk_trials)(&w, nodes, following);
    }
}

/* Returns 0, or -1 without memory. */
static int walk_trees(const fd_walks *job) {
    walking_team t = {.job = job};
    fd_parallel(walking_body, &t);
    return t.is_out_of_memory ? -1 : 0;
}

#endif
