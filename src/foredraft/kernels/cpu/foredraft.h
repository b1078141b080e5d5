/* Records that Python fills; records.py mirrors them field by field. */
#ifndef FOREDRAFT_H
#define FOREDRAFT_H

#include "suffix.h"

#include <stdint.h>

#define FD_PANEL 32 /* outputs of a panel */

enum { FD_BF16, FD_F32, FD_INT8, FD_INT4 };
enum { FD_SILU, FD_GELU_TANH, FD_RELU, FD_GELU, FD_CLAMPED }; /* a gated MLP has one of the first two */
enum { FD_KV_F32, FD_KV_BF16, FD_KV_INT8 };       /* formats of keys and values: kv.h */
enum { FD_EMBEDDED, FD_JOINED, FD_PAIRED };       /* fd_model.input_kind */
enum { FD_ROTARY, FD_LOCAL_ROTARY, FD_NO_ROTARY }; /* fd_layer.positions */
enum { FD_AFTER_FINAL_NORM = -1 };                /* hidden layer after the final norm; others are layer boundaries */

/* A packed matrix [n, k]. bf16: [n/32][k/2][32][2]; f32: [n/32][k][32]; int8, int4: quant.h. */
typedef struct {
    const void *data;
    const float *scale; /* int8, int4 */
    const float *bias;  /* [n] or NULL */
    int32_t n, k, kind, group;
} fd_weight;

/* Rows of a forward pass. Row t sees `num_committed[t]` tokens through its page table, then its own path. */
typedef struct {
    int32_t num_rows, page_size, num_logits, max_keys;
    const int32_t *tokens, *write_slots;        /* [num_rows] token ids, slots of the rows' own keys and values */
    const int32_t *pages, *page_offset;         /* page tables, concatenated; [num_rows] start of a row's table */
    const int32_t *path_slots, *path_offset;    /* slots of the paths, concatenated; [num_rows] start of a row's path */
    const int32_t *num_committed, *path_length; /* [num_rows]; a path includes the row itself */
    const int32_t *logit_rows;                  /* [num_logits] */
} fd_rows;

/* A mixture of experts, each of them a gated MLP. All have one shape and format. */
typedef struct {
    int32_t count, per_token, inner;
    int32_t activation;              /* one of a gated MLP's, or CLAMPED: (y + 1) * x * sigmoid(alpha * x) of a gate x
                                      * and a value y, both clamped to `limit` */
    float alpha, limit;
    int32_t is_normalised;           /* the chosen experts' weights sum to 1; otherwise those of all experts do */
    fd_weight router;                /* [count, hidden] */
    const fd_weight *gate_up, *down; /* [count] */
} fd_experts;

/* The recurrent part of a layer: recurrent.h. Fields that a kind does not have are NULL or 0. */
enum { FD_DELTA, FD_MAMBA2, FD_SHORT_CONV };
typedef struct {
    int32_t kind, channels, taps; /* channels and inputs of the convolution */
    int32_t heads, groups;        /* heads; groups of heads that share queries and keys */
    int32_t key_dim, value_dim;   /* a head's state has a column of key_dim numbers for each number of a value */
    int32_t norm_width;           /* outputs that are normed together; DELTA value_dim */
    int32_t width, inner;         /* numbers of a projected row, and of a row of the output projection */
    /* Places in a projected row. Channels of the convolution: DELTA queries, keys, values; MAMBA2 values, keys, queries.
     * SHORT_CONV: the row is its input gate, output gate and input. */
    int32_t conv_at, gate_at, step_at, share_at;
    float eps, min_step, max_step;
    const float *conv_weight, *conv_bias; /* [taps, channels], the oldest first; [channels] */
    const float *rate, *step_bias, *skip; /* [heads] negative rate of decay per step; its bias; share of the value */
    const float *norm;                    /* [value_dim] DELTA, [inner] MAMBA2 */
    fd_weight input, out;
    fd_weight steps; /* the last outputs of a projected row, in a format of their own; n = 0: they are in `input` */
} fd_mixer;

/* Runs of rows: chains from one state to another. State 0 is the null state. The run that ends in the start state of
 * another one, if it is in this pass, stands before it. */
typedef struct {
    int32_t num_runs;
    const int32_t *first_row, *length, *start_state, *end_state; /* [num_runs] */
    /* [num_runs] Slots in which a member keeps the state after a run for the runs that follow it, and the slot with the
     * start state; -1 = none. A slot is used again after the last of them. */
    const int32_t *slot, *start_slot;
} fd_runs;

/* Arguments of the recurrent part of one layer. */
typedef struct {
    const fd_mixer *mixer;
    const fd_runs *runs;
    float *projected;   /* [num_rows, width]; the convolution replaces its inputs by its outputs */
    float *conv_states; /* [states, taps - 1, channels] last inputs of the convolution, the oldest first */
    float *states;      /* [states, heads], of each [value_dim, key_dim] numbers in an order of its own */
    float *out;         /* [num_rows, inner] */
    int32_t num_rows;
} fd_mixing;

/* A decoder layer with a gated MLP, or with experts. Fields that are NULL or 0 are absent. */
typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden]; attention_norm NULL = no norm */
    const float *q_norm, *k_norm;           /* [head_dim], or of all heads together: fd_model.has_joint_head_norm */
    const float *attention_post_norm, *mlp_post_norm; /* [hidden]; norm of the output before it is added */
    fd_weight qkv, out, gate_up, down;      /* gate_up: 16 rows of gate, 16 of up, and so on */
    int32_t sliding_window;                 /* most keys that a row sees; 0 = all */
    int32_t positions;                      /* rotary table of queries and keys, or none */
    const fd_experts *experts;              /* in place of gate_up and down, or, with these, beside a shared MLP */
    const float *shared_gate;               /* [hidden]; the sigmoid of its product with a row multiplies the shared MLP */
    const float *sinks;                     /* [heads] score of a key without a value, which every row sees */
    const fd_mixer *mixer;                  /* in place of attention; its qkv, out and so on are absent */
} fd_layer;

/* A decoder-only model, or the decoder layers of a drafter (decoder_only.h).
 *
 * The residual stream starts as the token's embedding, or as a drafter computes it from the embedding and an input row:
 * JOINED: a product of both, concatenated, each normed if it has a norm. PAIRED: the input, or its norm; the first layer's attention is twice as wide
 * as the others' and reads the embedding normed by attention_norm and the input normed by input_norm. */
typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, rotary, inner, activation, kv_kind, has_bf16_embedding;
    int32_t input_kind, norm_before_residual;
    int32_t is_parallel;         /* the MLP reads the residual stream before the attention's output is added */
    int32_t has_joint_head_norm; /* q_norm is [heads * head_dim], k_norm [kv_heads * head_dim] */
    int32_t has_attention_gate;  /* qkv has [heads * head_dim] further outputs, whose sigmoids multiply the attention's */
    float eps, scale, softcap, embedding_scale, residual_scale, logit_scale, logit_softcap;
    const void *embedding;   /* [V, hidden] */
    const float *norm;       /* [hidden] or NULL */
    const float *input_norm, *embedding_norm; /* [hidden]; of a drafter's inputs, JOINED: NULL = none */
    const float *norm_bias;  /* [hidden]: norms of the residual stream are LayerNorms with this bias; NULL: RMSNorms */
    const float *cos, *sin;  /* [positions, rotary / 2] */
    const float *local_cos, *local_sin; /* the same for layers with LOCAL_ROTARY */
    const fd_layer *layer;
    fd_weight fc; /* [hidden, 2 * hidden], JOINED */
    fd_weight head;
    const fd_layer *adapter; /* or NULL; only its MLP runs, with SiLU and unscaled, before the final norm */
} fd_model;

/* What an adapter adds to a product: y += B (A x), with the adapter's scale in B. B is stored in blocks of FD_BLOCK
 * outputs. Block i multiplies the numbers [column[i], column[i] + width[i]) of A x by [width[i]][FD_BLOCK] factors. */
#define FD_BLOCK 16
typedef struct {
    fd_weight a; /* [rank, k], bf16 or f32; n = 0: the adapter does not change this product, but k and kind are set */
    const float *b;
    const int32_t *column, *width, *offset; /* [blocks of all panels]; offset in b */
} fd_low_rank;

enum { FD_QKV, FD_OUT, FD_GATE_UP, FD_DOWN, FD_PRODUCTS };

/* What an adapter adds to the products of a layer. */
typedef struct {
    fd_low_rank of[FD_PRODUCTS];
} fd_layer_change;

/* Rows of a pass with adapters. A place is one of these rows; places are sorted by adapter. A group has places of one
 * adapter. */
typedef struct {
    int32_t num_places, num_groups, max_rank;
    int32_t products;                     /* bit p: some adapter changes product p */
    int64_t input_bytes;                  /* most bytes of a row of an input of A */
    const int32_t *place;                 /* [num_rows] place of a row, -1 = it has no adapter */
    const int32_t *row;                   /* [num_places] row of a place */
    const int32_t *group;                 /* [num_places] first place of its group */
    const int32_t *first;                 /* [num_groups + 1] first place of every group */
    const fd_layer_change *const *change; /* [num_places] of its adapter, by layer */
    char *input;                          /* [num_places, input_bytes] */
    float *inner;                         /* [num_places, max_rank] A x */
} fd_adapted;

/* Rows of images. Their states replace the embeddings of their tokens. */
typedef struct {
    const int32_t *index;      /* [num_rows] row in `states`, -1 = the embedding of the token */
    const float *states;       /* [.., hidden] */
    const int32_t *ahead;      /* [num_rows] keys after a row's own that it sees; its path includes them */
    const float *cos, *sin;    /* [num_rows, rotary / 2] factors of the rows; NULL = those of their places */
    const float *const *added; /* [num_added] of [.., hidden]: added to the residual stream after the first layers */
    int32_t num_added;
} fd_images;

/* Inputs and outputs of a forward pass. */
typedef struct {
    void *const *keys, *const *values;             /* [layers] of [slots, kv_heads, head_dim] */
    void *const *cross_keys, *const *cross_values; /* the same, of the sources; encoder-decoder models */
    const int32_t *hidden_layers;                  /* [hidden_layer_count] layer boundaries to return */
    int32_t hidden_layer_count, has_bf16_features;
    int32_t reads_logit_rows; /* features of rows without logits are not read, so they may stay as they are */
    const float *inputs; /* [num_rows, hidden] or, if the model is EMBEDDED, NULL */
    void *features;      /* [num_rows, hidden_layer_count * hidden] float32 or bf16 */
    float *logits;       /* [num_logits, V] */
    char *scratch;
    const fd_adapted *adapted; /* NULL = no row has an adapter; decoder-only models */
    const fd_images *images;   /* NULL = no request has images; decoder-only models */
    const fd_runs *runs;       /* NULL = no layer is recurrent */
    void *const *conv_states, *const *states; /* [layers] states of the recurrent layers, as in fd_mixing */
} fd_pass;

typedef struct {
    const float *query; /* [num_rows, heads, head_dim] */
    const void *keys, *values;
    float *out; /* [num_rows, heads, head_dim] */
    int32_t heads, kv_heads, head_dim, kv_kind, sliding_window;
    float scale, softcap;
    const float *bias;    /* [heads, max_distance + 1] or NULL: bias of keys max_distance, ..., 0 positions back */
    int32_t max_distance; /* keys further back have entry 0 */
    const float *sinks;   /* [heads] or NULL, as in fd_layer */
    /* NULL: causal. Otherwise the rows' own positions, which keys may follow; `bias` goes on for 1, ..., max_distance
     * positions ahead. */
    const fd_rows *query_rows;
    const int32_t *ahead; /* [num_rows] keys after a row's own that it sees, as in fd_images; NULL = none */
} fd_attention;

typedef struct {
    const float *weight, *bias; /* [hidden]; with a bias LayerNorm, otherwise RMSNorm */
} fd_norm;

/* A layer of an encoder-decoder model: encdec.h. */
typedef struct {
    fd_norm self_norm, cross_norm, mlp_norm;
    fd_weight qkv, self_out, cross_query, cross_out, mlp_in, mlp_out; /* mlp_in: as gate_up if gated */
    const float *bias;                                                /* as in fd_attention */
} fd_encdec_layer;

/* The decoder, or the encoder, of an encoder-decoder model. */
typedef struct {
    int32_t layers, hidden, heads, head_dim, inner, activation, is_gated, is_post_norm, kv_kind, max_distance;
    int32_t is_encoder; /* rows see all rows of their own source and nothing else; no logits */
    float eps, scale, logit_scale;
    fd_norm norm; /* final norm; its weight may be NULL */
    const fd_encdec_layer *layer;
    fd_weight head;
} fd_encdec;

/* Sampling parameters of a row; sampling/params.py has their meaning. */
typedef struct {
    double temperature, top_k, top_p, min_p, typical_p;
} fd_settings;

/* From rows of logits to probabilities or sampled tokens: sampler.h. */
typedef struct {
    const void *logits;          /* [rows, stride] float32 or bf16 */
    const int64_t *rows;         /* [num_rows] rows of the logits */
    const fd_settings *settings; /* [num_rows] */
    const int64_t *keys;         /* [num_rows] noise keys, for tokens */
    float *probs;                /* [num_rows, vocab] or NULL */
    int32_t *tokens;             /* [num_rows] or NULL */
    double *masses;              /* [num_rows, vocab] or NULL: normalised probabilities of the listed tokens, or of all */
    int64_t *ids;                /* [num_rows, vocab] listed tokens, for masses */
    int32_t *counts;             /* [num_rows] of listed tokens; -1 = masses of all, 0 = no distribution */
    int64_t stride;
    double margin; /* relative distance of the best score from all others below which the race is uncertain */
    int32_t num_rows, vocab, is_bf16;
} fd_sampling;

/* A request whose draft is verified. Its rows of logits, q, tokens and parents are consecutive, that of the root first. */
typedef struct {
    fd_settings settings;
    uint64_t seed, sample_index;
    int64_t position; /* of the root in the sequence */
    int64_t first_row;
    int32_t num_rows, walk; /* walk: kernels/tree_walk.py */
} fd_walk_request;

/* Verification of drafts: tree_walk.h. Nodes are counted from the root. */
typedef struct {
    const void *logits;         /* [rows, stride] float32 or bf16 */
    const float *q;             /* [rows, q_stride] distributions that children were sampled from; NULL = none was */
    const int32_t *tokens;      /* [rows] tokens of the nodes */
    const int32_t *parents;     /* [rows] parents of the nodes, which stand before them; that of the root is -1 */
    const int32_t *num_sampled; /* [rows] leading children that were sampled; NULL = all */
    const fd_walk_request *requests; /* [num_requests] */
    int32_t *nodes, *following; /* [rows] committed nodes of a request from its first row on, and the token after each */
    int32_t *counts;            /* [num_requests] of committed nodes; 0 = none, -1 = rounding decides about a token */
    int64_t stride, q_stride;
    double margin; /* as in fd_sampling */
    int32_t num_requests, vocab, is_bf16;
} fd_walks;

/* Chains of draft tokens, one per request: how they are sampled, and the tokens (draft_level.h). */
typedef struct {
    const fd_settings *settings; /* [num_drafts] */
    const int64_t *keys;         /* [num_drafts, max_depth] noise keys */
    const int32_t *depths;       /* [num_drafts] most tokens, up to max_depth */
    const int32_t *end_ids, *end_offset; /* tokens that end a draft, concatenated; [num_drafts + 1] */
    const int32_t *uses_q;               /* [num_drafts] whether a sampled draft returns q */
    const int32_t *token_ids;            /* [columns] token of each column of the logits, ascending; NULL = its index */
    float *q;        /* [num_drafts, max_depth + 1, vocab]: rows of the nodes up to the last token; or NULL */
    int32_t *tokens; /* [num_drafts, max_depth] */
    int32_t *counts; /* [num_drafts] number of tokens */
    double margin;   /* as in fd_sampling */
    int32_t num_drafts, max_depth, columns, vocab;
} fd_drafts;

/* One chain from the matches of suffix automata: suffix_chain.h. `columns` and `token_ids` of the drafts are not used. */
typedef struct {
    fd_drafts drafts;
    fd_match *matches;       /* [2, num_matches]: those of the root, which are advanced; the second row is scratch */
    const double *discounts; /* products of discounts by context length */
    double *expected_accepted; /* expected accepted tokens by the probabilities of the contexts */
    double min_confidence;     /* the chain ends if its likeliest path is less likely */
    int32_t num_matches;
} fd_suffix_chain;

/* Chains of a decoder: chain.h. Position `starts[b] + d` of a request has the entry of its draft token at depth d; depth 0
 * is the root, whose entry is computed before or by the first pass. */
typedef struct {
    fd_drafts drafts;
    const fd_rows *first;  /* first pass, with one row of logits per draft, in order; NULL = its outputs are given */
    const int32_t *starts; /* [num_drafts] position of the root's entry */
    const int32_t *slots;  /* [num_drafts, max_depth + 1] slots of these positions; that of the last is not used */
    const int32_t *pages, *page_offset; /* page tables, concatenated; [num_drafts] start of a draft's table */
    int32_t max_keys, page_size;
} fd_chain;

/* A step of a network on the target's last state: step_network.h. Fields that a kind does not have are NULL or 0. */
typedef struct {
    fd_weight input;         /* product with the state, or with all tokens' embeddings too */
    fd_norm norm, cell_norm; /* RMS norms with a shift */
    const void *embedding;   /* [V, width] */
    const fd_weight *blocks; /* [num_blocks] products after `input` */
    fd_weight head;
    int32_t num_blocks;
} fd_step;

/* MLP and LSTM: cells of the MLP speculator. HEADS: Hydra. PARALLEL: heads that read no token, all of them in step 0. */
enum { FD_STEP_MLP, FD_STEP_LSTM, FD_STEP_HEADS, FD_STEP_PARALLEL };

typedef struct {
    const fd_step *steps;      /* [num_steps]; PARALLEL: one */
    const float *input_weight; /* [hidden] of the RMS norm of the target's state, or NULL = no norm */
    int32_t kind, num_steps, hidden, inner, has_bf16_embedding;
    float token_share, eps; /* weight of an embedding that is added to a state */
} fd_step_network;

/* One step over some rows. */
typedef struct {
    const float *states;   /* [num_rows, width of the states that this step reads] */
    const int32_t *tokens; /* [num_rows] */
    float *next;           /* [num_rows, width of the states that the next step reads]; PARALLEL: not used */
    float *logits;         /* [num_rows, n of the head]; PARALLEL: [num_rows, num_steps, n] */
    char *scratch;
    int32_t step, num_rows;
} fd_step_pass;

/* Roots of chains of steps. */
typedef struct {
    const void *const *states; /* [num_drafts] target states [hidden], bf16 or float32 */
    const int32_t *tokens;     /* [num_drafts] tokens after them */
    char *scratch;
    int32_t has_bf16_states;
} fd_step_roots;

/* Choices of bfloat16 and float32 products that change the time and no bit. kernels/tuning.py finds the best ones. */
typedef struct {
    int32_t prefetch;    /* bytes ahead in a panel that are prefetched; 0 = the hardware prefetcher alone */
    int32_t vectors;     /* most vectors of outputs that are summed side by side: 8, 4 or 2 */
    int32_t chunk_bytes; /* weights that a thread takes at a time, at least four panels */
} fd_tuning;
enum { FD_ROW_CLASSES = 3 };               /* products of 1 row, of 2 to 4, of more */
extern fd_tuning fd_tuned[FD_ROW_CLASSES]; /* of this process */

/* Arguments of one product y = x W^T. */
typedef struct {
    const fd_weight *weight;
    const float *x; /* [rows, k] */
    float *out;     /* [rows, n] */
    char *scratch;
    int32_t rows;
} fd_linear_args;

#endif
