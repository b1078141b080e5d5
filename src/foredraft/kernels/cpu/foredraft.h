/* Shared declarations: the records that Python fills (library.py mirrors them field by field) and the thread team. */
#ifndef FOREDRAFT_H
#define FOREDRAFT_H

#include <stdatomic.h>
#include <stdint.h>

#define FD_PANEL 32 /* outputs of a panel */

enum { FD_BF16, FD_F32, FD_INT8, FD_INT4 };
enum { FD_SILU, FD_GELU_TANH, FD_RELU, FD_GELU }; /* gates support the first two */
enum { FD_EMBEDDED, FD_JOINED, FD_PAIRED }; /* start of the residual stream: fd_model.front */
enum { FD_NORMED = -1 }; /* tap after the final norm; other taps count layers */

/* A packed matrix [n, k]. bf16: [n/32][k/2][32][2]; f32: [n/32][k][32]; int8, int4: quant.h. */
typedef struct {
    const void *data;
    const float *scale; /* int8, int4 */
    const float *bias;  /* [n] or NULL */
    int32_t n, k, kind, group;
} fd_weight;

/* Row t of a pass sees `start[t]` committed tokens through its page table, then its own path. */
typedef struct {
    int32_t rows, page_size, num_logits, longest;
    const int32_t *tokens, *write;      /* [rows] token ids, slots to write */
    const int32_t *pages, *page_at;     /* page tables, concatenated; [rows] start of a row's table */
    const int32_t *tails, *tail_at;     /* slots of the paths, concatenated; [rows] start of a row's path */
    const int32_t *start, *tail;        /* [rows] committed tokens, length of the path, the row itself included */
    const int32_t *logit_rows;          /* [num_logits] */
} fd_window;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden]; attention_norm NULL = no norm */
    const float *q_norm, *k_norm;           /* [head_dim] or NULL */
    fd_weight qkv, out, gate_up, down;      /* gate_up: 16 rows of gate, 16 of up, and so on */
    int32_t sliding;                        /* keys a row may see at most; 0 = all */
} fd_layer;

/* The stream starts as the token's embedding, or as a drafter computes it from the embedding and an input row:
 * JOINED: a product of both, concatenated. PAIRED: the input, or its norm; the first layer's attention is twice as wide
 * as the others' and reads the embedding normed by attention_norm and the input normed by input_norm. */
typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, rotary, inner, activation, has_bf16_kv, has_bf16_embedding;
    int32_t front, norm_before_residual;
    float eps, scale, softcap, embedding_scale, residual_scale, logit_scale;
    const void *embedding;   /* [V, hidden] */
    const float *norm;       /* [hidden] or NULL */
    const float *input_norm; /* [hidden], PAIRED */
    const float *cos, *sin;  /* [positions, rotary / 2] */
    const fd_layer *layer;
    fd_weight join; /* [hidden, 2 * hidden], JOINED */
    fd_weight head;
    const fd_layer *adapter; /* or NULL; only its MLP runs, with SiLU and unscaled, before the final norm */
} fd_model;

typedef struct {
    void *const *keys, *const *values; /* [layers] of [slots, kv_heads, head_dim] */
    const int32_t *taps;               /* [num_taps] boundaries */
    int32_t num_taps;
    const float *inputs; /* [rows, hidden] unless the model is EMBEDDED */
    float *features;     /* [rows, num_taps * hidden] */
    float *logits;       /* [num_logits, V] */
    char *scratch;
} fd_pass;

typedef struct {
    const float *query; /* [rows, heads, head_dim] */
    const void *keys, *values;
    float *out; /* [rows, heads, head_dim] */
    int32_t heads, kv_heads, head_dim, has_bf16_kv, sliding;
    float scale, softcap;
    const float *bias; /* [heads, far + 1] or NULL: added to keys far, ..., 0 ranks back; entry 0 also beyond */
    int32_t far;
    const fd_window *places; /* NULL: a row sees no later key. Else bias continues for 1, ..., far ranks ahead */
} fd_attention;

typedef struct {
    const float *weight, *shift; /* [hidden]; without a shift the mean is not subtracted */
} fd_norm;

/* A decoder layer with cross-attention to a source: pair.h. */
typedef struct {
    fd_norm own_norm, cross_norm, inner_norm;
    fd_weight qkv, out, query, cross_out, wide, narrow; /* wide: as gate_up if gated */
    const float *bias;                                  /* as in fd_attention */
} fd_pair_layer;

typedef struct {
    int32_t layers, hidden, heads, head_dim, inner, activation, is_gated, norms_after, has_bf16_kv, far;
    int32_t is_encoder; /* rows see all rows of their own source and nothing else; no logits */
    float eps, scale, logit_scale;
    fd_norm norm; /* final norm; its weight may be NULL */
    const fd_pair_layer *layer;
    fd_weight head;
} fd_pair;

typedef struct {
    void *const *keys, *const *values;             /* [layers] of [slots, heads, head_dim] */
    void *const *cross_keys, *const *cross_values; /* the same, of sources */
    const int32_t *taps;                           /* [num_taps] boundaries */
    int32_t num_taps;
    const float *inputs; /* [rows, hidden] embedded */
    float *features;     /* [rows, num_taps * hidden] */
    float *logits;       /* [num_logits, V] */
    char *scratch;
} fd_pair_pass;

typedef struct {
    const fd_weight *weight;
    const float *x; /* [rows, k] */
    float *out;     /* [rows, n] */
    char *scratch;
    int32_t rows;
} fd_product;

typedef struct {
    atomic_int size, arrived, generation, next;
} fd_team;

/* Every member calls body(what, team). `next` counts the work items; a barrier resets it to zero. */
typedef void (*fd_body)(void *what, fd_team *team);
void fd_parallel(fd_body body, void *what);
void fd_barrier(fd_team *team);
int fd_num_threads(void);

static inline int fd_take(fd_team *team, int count) {
    return atomic_fetch_add_explicit(&team->next, count, memory_order_relaxed);
}

/* Entry points of one instruction set. */
typedef struct {
    const char *name;
    int64_t (*scratch)(const fd_model *, const fd_window *, int threads);
    void (*forward)(const fd_model *, const fd_window *, const fd_pass *);
    int64_t (*linear_scratch)(const fd_weight *, int rows);
    void (*linear)(const fd_product *);
    int64_t (*attention_scratch)(const fd_attention *, const fd_window *, int threads);
    void (*attention)(const fd_attention *, const fd_window *, char *scratch);
    uint32_t (*read)(const void *, int64_t bytes);
    int64_t (*pair_scratch)(const fd_pair *, const fd_window *, const fd_window *sources, int threads);
    void (*pair_forward)(const fd_pair *, const fd_window *, const fd_window *sources, const fd_pair_pass *);
} fd_kernels;

#endif
