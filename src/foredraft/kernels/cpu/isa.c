/* All code that depends on the instruction set. Compiled once per set, with FD_ISA as its name. */
#include "attention.h"
#include "chain.h"
#include "decoder_only.h"
#include "encdec.h"
#include "kernels.h"
#include "linear.h"
#include "masses.h"
#include "recurrent.h"
#include "sampler.h"
#include "step_chain.h"
#include "step_network.h"
#include "suffix_chain.h"
#include "team.h"
#include "tree_walk.h"

#define JOIN(a, b) a##b
#define NAME(isa) JOIN(fd_, isa)
#define QUOTE(x) #x
#define STRING(x) QUOTE(x)

static int64_t linear_scratch(const fd_weight *w, int rows) { return row_bytes(w) * rows + 64; }

static void linear_body(void *arg, fd_team *team) {
    const fd_linear_args *p = arg;
    const fd_weight *w = p->weight;
    char *x = align(p->scratch);
    FOR_EACH_ITEM(r, p->rows) convert_row(w, p->x + (long)r * w->k, x + r * row_bytes(w));
    fd_barrier(team);
    epilogue to_out = store_to(w, p->out, w->n, 1.0f);
    matmul(team, w, x, p->rows, &to_out);
}

static void linear(const fd_linear_args *p) { fd_parallel(linear_body, (void *)p); }

typedef struct {
    const fd_attention *attention;
    const fd_rows *rows;
    char *scratch;
    atomic_int num_members;
} attention_job;

INLINE int64_t member_scratch(const fd_attention *a, const fd_rows *rows) {
    return attention_scratch(rows, a->heads / a->kv_heads);
}

static void attention_body(void *arg, fd_team *team) {
    attention_job *j = arg;
    const fd_attention *a = j->attention;
    char *scratch = align(j->scratch) + atomic_fetch_add(&j->num_members, 1) * member_scratch(a, j->rows);
    attend_rows(a, j->rows, team, scratch, NOT_ROUNDED);
}

static int64_t team_attention_scratch(const fd_attention *a, const fd_rows *rows, int threads) {
    return threads * member_scratch(a, rows) + 64;
}

static void attention(const fd_attention *a, const fd_rows *rows, char *scratch) {
    attention_job j = {.attention = a, .rows = rows, .scratch = scratch};
    fd_parallel(attention_body, &j);
}

typedef struct {
    const char *from;
    int64_t bytes;
    atomic_uint checksum;
} memory_read;

enum { READ_CHUNK = 1 << 20 };

/* Reads memory with little arithmetic: the upper bound for the speed of a product. */
static void memory_read_body(void *arg, fd_team *team) {
    memory_read *r = arg;
    vu acc[8] = {0};
    for (int64_t i; (i = (int64_t)fd_take(team, 1) * READ_CHUNK) < r->bytes;) {
        int64_t end = i + READ_CHUNK < r->bytes ? i + READ_CHUNK : r->bytes;
        for (; i + 32 * LANES <= end; i += 32 * LANES) {
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)
                acc[j] ^= load_words((const uint32_t *)(r->from + i) + j * LANES);
        }
    }
    uint32_t checksum = 0;
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < LANES; i++) checksum ^= acc[j][i];
    atomic_fetch_xor(&r->checksum, checksum);
}

static uint32_t read_memory(const void *from, int64_t bytes) {
    memory_read r = {.from = from, .bytes = bytes};
    fd_parallel(memory_read_body, &r);
    return r.checksum;
}

const fd_kernels NAME(FD_ISA) = {
    .name = STRING(FD_ISA),
    .decoder_scratch = decoder_only_scratch,
    .decoder_forward = decoder_only_forward,
    .encdec_scratch = encdec_scratch,
    .encdec_forward = encdec_forward,
    .linear_scratch = linear_scratch,
    .linear = linear,
    .attention_scratch = team_attention_scratch,
    .attention = attention,
    .read_memory = read_memory,
    .mix = mix_rows,
    .sample = sample,
    .walk_trees = walk_trees,
    .chain_scratch = chain_scratch,
    .draft_chains = draft_chains,
    .step_scratch = step_scratch,
    .forward_step = forward_step,
    .step_chain_scratch = step_chain_scratch,
    .draft_steps = draft_steps,
    .draft_suffix = draft_suffix,
    .sum_masses = sum_masses,
    .divide_masses = divide_masses,
    .subtract_masses = subtract_masses,
    .sample_mass = sample_mass,
};
