/* Entry points of one instruction set. */
#ifndef FD_KERNELS_H
#define FD_KERNELS_H

#include "foredraft.h"

typedef struct {
    const char *name;
    int64_t (*decoder_scratch)(const fd_model *, const fd_rows *, int threads);
    void (*decoder_forward)(const fd_model *, const fd_rows *, const fd_pass *);
    int64_t (*linear_scratch)(const fd_weight *, int rows);
    void (*linear)(const fd_linear_args *);
    int64_t (*attention_scratch)(const fd_attention *, const fd_rows *, int threads);
    void (*attention)(const fd_attention *, const fd_rows *, char *scratch);
    uint32_t (*read_memory)(const void *, int64_t bytes);
    int64_t (*encdec_scratch)(const fd_encdec *, const fd_rows *, const fd_rows *sources, int threads);
    void (*encdec_forward)(const fd_encdec *, const fd_rows *, const fd_rows *sources, const fd_pass *);
    void (*mix)(const fd_mixing *);
    int (*sample)(const fd_sampling *);
    int (*walk_trees)(const fd_walks *);
    int64_t (*chain_scratch)(const fd_model *, const fd_chain *, int threads);
    int (*draft_chains)(const fd_model *, const fd_chain *, const fd_pass *first);
    int64_t (*step_scratch)(const fd_step_network *, int rows);
    void (*forward_step)(const fd_step_network *, const fd_step_pass *);
    int64_t (*step_chain_scratch)(const fd_step_network *, const fd_drafts *);
    int (*draft_steps)(const fd_step_network *, const fd_drafts *, const fd_step_roots *);
    int (*draft_suffix)(const fd_suffix_chain *);
    double (*sum_masses)(const void *, int is_float, int64_t n);
    void (*divide_masses)(const void *, int is_float, int64_t n, double total, double *out);
    void (*subtract_masses)(const double *p, double weight, const double *q, int64_t n, double *out);
    int64_t (*sample_mass)(const double *, int64_t n, double u, double *sums);
} fd_kernels;

#endif
