/* From logits to probabilities, and to a token that was sampled with keyed noise. sampling/weights.py and filters.py are
 * the reference, with the same bits.
 *
 * A row is read once for its maximum and the maxima of its blocks. Later passes skip the blocks that cannot matter. A
 * filter turns the row into a list of the tokens that it keeps, in ascending order. */
#ifndef FD_SAMPLER_H
#define FD_SAMPLER_H

#include "foredraft.h"
#include "masses.h"
#include "race.h"
#include "selection.h"
#include "team.h"

enum { INVALID_TOKEN = -1, UNCERTAIN_TOKEN = -2 }; /* a row without a distribution; a race that is too close */
enum { BLOCK = RACE_BLOCK, BLOCK_VECTORS = BLOCK / LANES };
static const float NO_LOGIT = -INFINITY;

/* One row and its scratch. */
typedef struct {
    const fd_sampling *job;
    const float *x; /* [V] */
    float tail[BLOCK]; /* the last block if it is not full, filled up with -inf */
    float *block_max;    /* [num_blocks] largest logits */
    float *block_weight; /* [num_blocks] largest weights, and a margin for rounding */
    float *all;          /* [num_blocks * BLOCK] weights of all tokens, if a filter or the output needs them */
    float *weight;       /* the same, of the list */
    int32_t *id;         /* the same, of the list */
    uint32_t *key;       /* the same, of the list or of the blocks */
    int32_t *member;     /* the same, scratch of find_cut */
    float *converted;    /* the same, logits of a bf16 row */
    int num_blocks, count; /* count: tokens of the list; -1 = no list, all tokens are kept */
    float max, scale;
    int64_t limit; /* of a nucleus that is not listed but checked after the race; 0 = none */
} sampler;

INLINE int64_t padded_size(int vocab) { return (int64_t)(vocab + BLOCK - 1) / BLOCK * BLOCK; }

/* Bytes of scratch of one member: converted logits, weights of both kinds, ids, keys and members, maxima of blocks. */
static int64_t sampler_scratch(int vocab) {
    int64_t size = padded_size(vocab);
    return (6 * size + 2 * (size / BLOCK + LANES)) * 4 + 64 * 8;
}

INLINE const float *block_logits(const sampler *s, int b) {
    return b == s->num_blocks - 1 && s->job->vocab % BLOCK ? s->tail : s->x + (long)b * BLOCK;
}

INLINE float reduce_max_fast(vf x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    return reduce_max(x);
#endif
}

/* Maximum of two vectors that are not NaN. */
INLINE vf pick_max(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect(a > b, a, b);
#endif
}

INLINE vi find_nan(vf a, vf b) {
#if LANES == 16
    return (vi)_mm512_maskz_set1_epi32(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q), -1);
#elif LANES == 8
    return (vi)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q);
#else
    return (a != a) | (b != b);
#endif
}

/* Reads a row. Returns whether it has a distribution: no NaN, and a largest logit that is finite. */
static int read_row(sampler *s, int64_t row) {
    float *converted = s->converted;
    const int vocab = s->job->vocab, full = vocab / BLOCK;
    s->num_blocks = (int)(padded_size(vocab) / BLOCK);
    s->count = -1;
    const char *from = (const char *)s->job->logits + row * s->job->stride * (s->job->is_bf16 ? 2 : 4);
    s->x = s->job->is_bf16 ? converted : (const float *)from;
    for (int i = 0; i < BLOCK; i++) s->tail[i] = NO_LOGIT;
    for (int i = full * BLOCK; i < vocab; i++)
        s->tail[i - full * BLOCK] = s->job->is_bf16 ? bf16_to_float(((const uint16_t *)from)[i]) : s->x[i];
    float max = NO_LOGIT;
    vi nan = {0};
    for (int b = 0; b < s->num_blocks; b++) {
        vf v[BLOCK_VECTORS];
        if (s->job->is_bf16 && b < full) {
            for (int i = 0; i < BLOCK_VECTORS; i++) {
                v[i] = load_bf16((const uint16_t *)from + (long)b * BLOCK + i * LANES);
                store(converted + (long)b * BLOCK + i * LANES, v[i]);
            }
        } else {
            const float *x = block_logits(s, b);
            for (int i = 0; i < BLOCK_VECTORS; i++) v[i] = load(x + i * LANES);
        }
        for (int i = 0; i < BLOCK_VECTORS; i += 2) nan |= find_nan(v[i], v[i + 1]);
        for (int i = 1; i < BLOCK_VECTORS; i++) v[0] = pick_max(v[0], v[i]);
        s->block_max[b] = reduce_max_fast(v[0]);
        max = s->block_max[b] > max ? s->block_max[b] : max;
    }
    s->max = max;
    for (int i = 0; i < LANES; i++)
        if (nan[i]) return 0;
    return isfinite(max);
}

INLINE vf compute_weights(const sampler *s, vf x) { return compute_power((x - s->max) * s->scale); }
INLINE float compute_exponent(const sampler *s, float x) { return (x - s->max) * s->scale; }
INLINE float compute_weight(const sampler *s, float x) { return compute_power_scalar(compute_exponent(s, x)); }

/* Lists the tokens whose logit is at least `floor`, in the blocks that have one; the weights are still logits. */
static void list_logits(sampler *s, float floor) {
    s->count = 0;
    for (int b = 0; b < s->num_blocks; b++) {
        if (!(s->block_max[b] >= floor)) continue;
        const float *x = block_logits(s, b);
        for (int i = 0; i < BLOCK; i += LANES) {
            vf logit = load(x + i);
            vi keep = logit >= floor;
            if (is_any(keep))
                s->count = append_kept(s->weight, s->id, s->count, logit, count_from(b * BLOCK + i), keep);
        }
    }
    while (s->count && s->id[s->count - 1] >= s->job->vocab) s->count--; /* padding has the logit -inf */
}

/* Fills the list up to a whole block with entries that have no weight. */
static void pad_list(sampler *s) {
    for (int64_t i = s->count; i < padded_size(s->count); i++) s->weight[i] = 0, s->id[i] = 0;
}

/* Keeps the entries of the list whose weight, or logit, is at least `floor`. */
static void keep_weights(sampler *s, float floor) {
    int kept = 0;
    for (int i = 0; i < s->count; i += LANES) {
        vf w = load(s->weight + i);
        vi keep = (w >= floor) & (count_from(i) < s->count);
        if (is_any(keep)) kept = append_kept(s->weight, s->id, kept, w, load_ints(s->id + i), keep);
    }
    s->count = kept;
}

/* Keeps the entries of the list whose key is in a cut, and that have a weight. */
static void keep_cut(sampler *s, const uint32_t *key, cut c) {
    int kept = 0;
    pad_list(s);
    for (int i = 0; i < s->count; i += LANES) {
        vf w = load(s->weight + i);
        vi keep = is_in_cut(c, load_words(key + i), count_from(i)) & (w > 0);
        if (is_any(keep)) kept = append_kept(s->weight, s->id, kept, w, load_ints(s->id + i), keep);
    }
    s->count = kept;
}

/* Turns the logits of the list into weights. */
static void weigh_list(sampler *s) {
    for (int64_t i = s->count; i < padded_size(s->count); i++) s->weight[i] = NO_LOGIT, s->id[i] = 0;
    for (int i = 0; i < s->count; i += LANES) store(s->weight + i, compute_weights(s, load(s->weight + i)));
}

static int64_t sum_list(sampler *s) {
    unit_sum sum = {0};
    pad_list(s);
    for (int i = 0; i < s->count; i += LANES) add_units(&sum, load(s->weight + i));
    return total_units(&sum);
}

/* The k-th largest logit of a list, or the smallest if it has fewer. */
static float find_kth(sampler *s, const float *x, int n, int k) {
    for (int i = 0; i < n; i++) s->key[i] = order_key(x[i]);
    if (n < k) k = n;
    return key_to_float(find_cut(s->key, NULL, n, k, s->member).key);
}

static void keep_top_k(sampler *s, int k) {
    float floor = k <= s->num_blocks ? find_kth(s, s->block_max, s->num_blocks, k) : NO_LOGIT; /* k tokens reach it */
    list_logits(s, floor);
    floor = find_kth(s, s->weight, s->count, k);
    keep_weights(s, floor);
    weigh_list(s);
}

/* Writes the weights of all tokens and returns their sum. */
static int64_t weigh_all(sampler *s) {
    unit_sum sum = {0};
    for (int b = 0; b < s->num_blocks; b++) {
        const float *x = block_logits(s, b);
        for (int i = 0; i < BLOCK; i += LANES) {
            vf w = compute_weights(s, load(x + i));
            store(s->all + (long)b * BLOCK + i, w);
            add_units(&sum, w);
        }
    }
    return total_units(&sum);
}

/* Lists the tokens whose weight is at least `floor`, above zero. Returns their sum. */
static int64_t list_weights(sampler *s, float floor) {
    unit_sum sum = {0};
    s->count = 0;
    for (int b = 0; b < s->num_blocks; b++) {
        if (s->block_weight[b] < floor) continue;
        for (int i = 0; i < BLOCK; i += LANES) {
            vf w = load(s->all + (long)b * BLOCK + i);
            vi keep = w >= floor;
            if (!is_any(keep)) continue;
            s->count = append_kept(s->weight, s->id, s->count, w, count_from(b * BLOCK + i), keep);
            add_units(&sum, (vf)((vi)w & keep));
        }
    }
    return total_units(&sum);
}

INLINE int64_t compute_limit(double mass, int64_t units) { return (int64_t)ceil(mass * (double)units); }

/* Blocks with a token whose weight is at least `floor`. */
static int count_blocks(const sampler *s, float floor) {
    int count = 0;
    for (int b = 0; b < s->num_blocks; b++) count += s->block_weight[b] >= floor;
    return count;
}

/* Lists the nucleus, or a few more tokens. Returns 0 if `is_lazy` and the list would be long. Tokens below `last` have
 * too little mass together to belong to the nucleus. */
static int list_nucleus(sampler *s, int64_t limit, int64_t units, int is_lazy) {
    float last = (float)((double)(units - limit) * UNIT / s->job->vocab) * 0.99f;
    if (!(last > 0x1p-60f)) last = 0x1p-126f;
    for (float floor = 0x1p-4f; floor > 8 * last; floor *= 0x1p-4f) {
        if (is_lazy && count_blocks(s, floor) > s->num_blocks / 8) break;
        if (list_weights(s, floor) >= limit) return 1;
    }
    if (!is_lazy) list_weights(s, last);
    return !is_lazy;
}

/* Keeps the nucleus. is_lazy: the race may check whether its token is in the nucleus, in place of the list. */
static void keep_top_p(sampler *s, double mass, int is_lazy) {
    int64_t limit;
    if (s->count < 0) {
        int64_t units = weigh_all(s);
        limit = compute_limit(mass, units);
        if (!list_nucleus(s, limit, units, is_lazy)) {
            s->count = -1;
            s->limit = limit;
            return;
        }
    } else limit = compute_limit(mass, sum_list(s));
    const uint32_t *key = (const uint32_t *)s->weight; /* floats above zero have the order of their bits */
    keep_cut(s, key, find_cut(key, s->weight, s->count, limit, s->member));
}

/* Lists all tokens with a weight. */
static void list_all(sampler *s) {
    list_logits(s, s->max + MIN_EXPONENT / s->scale * 1.001f);
    weigh_list(s);
    keep_weights(s, 0x1p-126f);
}

static void keep_min_p(sampler *s, double ratio) {
    float floor = (float)ratio;
    if ((double)floor < ratio) floor = nextafterf(floor, INFINITY); /* the smallest float32 that is not below */
    if (!(floor > 0)) floor = 0x1p-126f;
    if (s->count < 0) {
        float exponent = (float)log2(ratio > 0x1p-100 ? ratio : 0x1p-100) - 0.01f;
        list_logits(s, s->max + exponent / s->scale * 1.001f);
        weigh_list(s);
    }
    keep_weights(s, floor);
}

/* Keeps the tokens whose surprisal is nearest to the entropy. Both are relative to the same number of bits here: the
 * mean of -exponent is the entropy, and -exponent the surprisal, less log2 of the sum of all weights. */
static void keep_typical(sampler *s, double mass) {
    if (s->count < 0) list_all(s);
    int64_t units = sum_list(s), product = 0;
    for (int i = 0; i < s->count; i++) {
        float t = compute_exponent(s, s->id[i] / BLOCK == s->num_blocks - 1 && s->job->vocab % BLOCK
                                          ? s->tail[s->id[i] % BLOCK]
                                          : s->x[s->id[i]]);
        memcpy(&s->key[i], &t, 4);
        product += count_units((double)s->weight[i] * (double)t);
    }
    float mean = (float)((double)product / (double)units);
    for (int i = 0; i < s->count; i++) {
        float t;
        memcpy(&t, &s->key[i], 4);
        float gap = fabsf(t - mean);
        memcpy(&s->key[i], &gap, 4);
        s->key[i] = ~s->key[i];
    }
    keep_cut(s, s->key, find_cut(s->key, s->weight, s->count, compute_limit(mass, units), s->member));
}

INLINE int32_t find_likeliest(const sampler *s) {
    int b = 0, i = 0;
    while (s->block_max[b] < s->max) b++;
    const float *x = block_logits(s, b);
    while (x[i] < s->max) i++;
    return b * BLOCK + i;
}

static void list_argmax(sampler *s) {
    s->id[0] = find_likeliest(s);
    s->weight[0] = 1;
    s->count = 1;
}

static void filter(sampler *s, const fd_settings *of) {
    s->limit = 0;
    if (!(of->temperature > 0)) {
        list_argmax(s);
        return;
    }
    s->scale = compute_scale(of->temperature);
    for (int b = 0; b < s->num_blocks; b += LANES)
        store(s->block_weight + b, compute_weights(s, load(s->block_max + b)) * 1.0001f);
    if (of->top_k > 0 && of->top_k < s->job->vocab) keep_top_k(s, (int)of->top_k);
    if (of->top_p < 1) {
        int is_raced_only = !s->job->probs && !s->job->masses && !(of->min_p > 0) && !(of->typical_p < 1);
        keep_top_p(s, of->top_p, is_raced_only);
    }
    if (of->min_p > 0) keep_min_p(s, of->min_p);
    if (of->typical_p < 1) keep_typical(s, of->typical_p);
}

/* The tokens that come before a token of a nucleus: those with a larger weight, and those of the same with a lower id. */
typedef struct {
    float weight;
    int32_t token;
} rank;

INLINE int is_before(rank r, float weight, int32_t token) {
    return weight > r.weight || (weight == r.weight && token < r.token);
}

static int64_t sum_before(const sampler *s, rank r) {
    unit_sum sum = {0};
    for (int b = 0; b < s->num_blocks; b++) {
        if (s->block_weight[b] < r.weight) continue;
        for (int i = 0; i < BLOCK; i += LANES) {
            vf w = load(s->all + (long)b * BLOCK + i);
            vi keep = (w > r.weight) | ((w == r.weight) & (count_from(b * BLOCK + i) < r.token));
            add_units(&sum, (vf)((vi)w & keep));
        }
    }
    return total_units(&sum);
}

/* Races the tokens of a block whose u is large enough. r: race; limit: only tokens before it take part. */
static void race_block(race *r, const sampler *s, int b, rank limit) {
    uint8_t masks[WIDE_VECTORS];
    if (s->block_weight[b] < limit.weight) return;
    uint64_t needed = find_needed_bits(r, s->block_weight[b]);
    if (needed == ~(uint64_t)0 || !find_candidates(r, needed, b * BLOCK, NULL, masks)) return;
    const float *x = block_logits(s, b);
    for (int v = 0; v < WIDE_VECTORS; v++)
        for (uint32_t mask = masks[v]; mask; mask &= mask - 1) {
            int i = v * WIDE_LANES + __builtin_ctz(mask), token = b * BLOCK + i;
            float w = compute_weight(s, x[i]);
            if (token != r->token && is_before(limit, w, token)) race_token(r, token, w);
        }
}

/* Samples one of the tokens before `limit`. The likeliest token is first, for a high score to begin with. */
static int32_t race_all(sampler *s, uint64_t key, rank limit) {
    race r = {.key = key, .margin = s->job->margin, .inverse_best = INFINITY, .token = INVALID_TOKEN};
    int32_t likeliest = find_likeliest(s);
    if (is_before(limit, 1.0f, likeliest)) race_token(&r, likeliest, 1.0f);
    for (int b = 0; b < s->num_blocks; b++) race_block(&r, s, b, limit);
    return is_certain(&r) ? r.token : UNCERTAIN_TOKEN;
}

static int32_t race_list(sampler *s, uint64_t key) {
    race r = {.key = key, .margin = s->job->margin, .inverse_best = INFINITY, .token = INVALID_TOKEN};
    uint8_t masks[WIDE_VECTORS];
    pad_list(s);
    for (int first = 0; first < s->count; first += BLOCK) {
        vf max = load(s->weight + first);
        for (int i = LANES; i < BLOCK; i += LANES) max = pick_max(max, load(s->weight + first + i));
        uint64_t needed = find_needed_bits(&r, reduce_max_fast(max));
        if (needed == ~(uint64_t)0 || !find_candidates(&r, needed, 0, s->id + first, masks)) continue;
        for (int v = 0; v < WIDE_VECTORS; v++)
            for (uint32_t mask = masks[v]; mask; mask &= mask - 1) {
                int i = first + v * WIDE_LANES + __builtin_ctz(mask);
                if (s->weight[i] > 0) race_token(&r, s->id[i], s->weight[i]);
            }
    }
    return is_certain(&r) ? r.token : UNCERTAIN_TOKEN;
}

/* Samples a token. If the token of all is not in the nucleus, then that of the tokens before it, and so on: the winner
 * of the nucleus is the first winner that is in it. */
static int32_t run_race(sampler *s, uint64_t key) {
    if (s->count == 1) return s->id[0];
    if (s->count > 1) return race_list(s, key);
    rank limit = {0, 0}; /* all tokens with a weight come before it */
    for (;;) {
        int32_t token = race_all(s, key, limit);
        if (token < 0 || !s->limit) return token;
        limit = (rank){s->all[token], token};
        if (sum_before(s, limit) < s->limit) return token;
    }
}

/* Writes probabilities [V]; NaN throughout if the row has no distribution. */
static void write_probs(sampler *s, float *out, int is_valid) {
    const int vocab = s->job->vocab;
    if (!is_valid) {
        for (int i = 0; i < vocab; i++) out[i] = NAN;
        return;
    }
    if (s->count < 0) {
        float total = (float)((double)weigh_all(s) * UNIT);
        int i = 0;
        for (; i + LANES <= vocab; i += LANES) store(out + i, load(s->all + i) / total);
        for (; i < vocab; i++) out[i] = s->all[i] / total;
        return;
    }
    float total = (float)((double)sum_list(s) * UNIT);
    memset(out, 0, (size_t)vocab * sizeof *out);
    for (int i = 0; i < s->count; i++) out[s->id[i]] = s->weight[i] / total;
}

/* Writes the probabilities of all tokens into `all`. */
static void divide_all(sampler *s) {
    float total = (float)((double)weigh_all(s) * UNIT);
    for (int64_t i = 0; i < padded_size(s->job->vocab); i += LANES) store(s->all + i, load(s->all + i) / total);
}

/* Writes the masses of the listed tokens and their ids and returns their number, if they are less than one token in
 * SPARSE_FACTOR. Otherwise it writes the masses of all tokens and returns -1. */
enum { SPARSE_FACTOR = 4 };

static int32_t write_masses(sampler *s, double *masses, int64_t *ids) {
    const int vocab = s->job->vocab;
    const int is_sparse = s->count >= 0 && (int64_t)s->count * SPARSE_FACTOR < vocab;
    if (s->count < 0) {
        divide_all(s);
    } else {
        float total = (float)((double)sum_list(s) * UNIT);
        if (!is_sparse) memset(s->all, 0, (size_t)vocab * sizeof *s->all);
        for (int i = 0; i < s->count; i++) {
            s->weight[i] /= total;
            if (is_sparse) ids[i] = s->id[i];
            else s->all[s->id[i]] = s->weight[i];
        }
    }
    const float *p = is_sparse ? s->weight : s->all;
    int n = is_sparse ? s->count : vocab;
    divide_masses(p, 1, n, sum_masses(p, 1, n), masses);
    return is_sparse ? n : -1;
}

typedef struct {
    const fd_sampling *job;
    atomic_int is_out_of_memory;
} sampling_team;

INLINE void *take_scratch(char **scratch, int64_t bytes) {
    char *taken = *scratch;
    *scratch += (bytes + 63) / 64 * 64;
    return taken;
}

/* Gives a sampler a part of some scratch memory, sampler_scratch(vocab) bytes. */
static void place_sampler(sampler *s, int vocab, char **scratch) {
    int64_t bytes = padded_size(vocab) * 4;
    s->block_max = take_scratch(scratch, bytes / BLOCK + LANES * 4);
    s->block_weight = take_scratch(scratch, bytes / BLOCK + LANES * 4);
    s->all = take_scratch(scratch, bytes);
    s->weight = take_scratch(scratch, bytes);
    s->id = take_scratch(scratch, bytes);
    s->key = take_scratch(scratch, bytes);
    s->member = take_scratch(scratch, bytes);
    s->converted = take_scratch(scratch, bytes);
}

/* Gives a sampler the scratch memory of the calling thread, for rows of up to `vocab` tokens. Returns 0 without memory. */
static int set_up_sampler(sampler *s, int vocab) {
    char *scratch = fd_thread_memory(sampler_scratch(vocab));
    if (scratch) place_sampler(s, vocab, &scratch);
    return scratch != NULL;
}

/* Samples from one row of the job's logits, and writes its probabilities [V] to `probs` if that is not NULL. */
static int32_t sample_row(sampler *s, int64_t row, const fd_settings *settings, uint64_t key, float *probs) {
    int is_valid = read_row(s, row);
    if (is_valid) filter(s, settings);
    if (probs) write_probs(s, probs, is_valid);
    return is_valid ? run_race(s, key) : INVALID_TOKEN;
}

static void sampling_body(void *arg, fd_team *team) {
    sampling_team *t = arg;
    const fd_sampling *job = t->job;
    sampler s = {.job = job};
    if (!set_up_sampler(&s, job->vocab)) {
        t->is_out_of_memory = 1;
        return;
    }
    FOR_EACH_ITEM(r, job->num_rows) {
        int is_valid = read_row(&s, job->rows[r]);
        if (is_valid) filter(&s, &job->settings[r]);
        if (job->probs) write_probs(&s, job->probs + (int64_t)r * job->vocab, is_valid);
        if (job->masses) {
            const int64_t first = (int64_t)r * job->vocab;
            job->counts[r] = is_valid ? write_masses(&s, job->masses + first, job->ids + first) : 0;
        }
        if (job->tokens) job->tokens[r] = is_valid ? run_race(&s, job->keys[r]) : INVALID_TOKEN;
    }
}

/* Returns 0, or -1 without memory. */
static int sample(const fd_sampling *job) {
    sampling_team t = {.job = job};
    fd_parallel(sampling_body, &t);
    return t.is_out_of_memory ? -1 : 0;
}

#endif
