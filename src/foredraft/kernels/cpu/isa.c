/* All code that depends on the instruction set. Compiled once per set, with FD_ISA as its name. */
#include "attention.h"
#include "decoder_only.h"
#include "encdec.h"
#include "kernels.h"
#include "linear.h"


#define JOIN(a, b) a##b
#define NAME(isa) JOIN(fd_, isa)
#define QUOTE(x) #x
#define STRING(x) QUOTE(x)

static int64_t linear_scratch(const fd_weight *w, int rows) { return row_bytes(w) * rows + 64; }

static void linear_body(void *arg, fd_team *team) {
    const fd_linear_args *p = arg;
    char *x = align(p->scratch);
    for (int r; (r = fd_take(team, 1)) < p->rows;)
        convert_row(p->weight, p->x + (long)r * p->weight->k, x + r * row_bytes(p->weight));
    fd_barrier(team);
    epilogue s = {EPILOGUE_STORE, 0, p->weight->n, p->out, p->weight->n, p->weight->bias, 1.0f};
    matmul(team, p->weight, x, p->rows, &s);
}

static void linear(const fd_linear_args *p) { fd_parallel(linear_body, (void *)p); }

typedef struct {
    const fd_attention *a;
    const fd_rows *w;
    char *scratch;
    atomic_int members;
} attention_job;

static void attention_body(void *arg, fd_team *team) {
    attention_job *j = arg;
    int me = atomic_fetch_add(&j->members, 1);
    char *mine = align(j->scratch) + me * attention_scratch(j->w, j->a->heads / j->a->kv_heads);
    for (int i; (i = fd_take(team, 1)) < j->w->num_rows * j->a->kv_heads;)
        attend(j->a, j->w, i / j->a->kv_heads, i % j->a->kv_heads, mine);
}

static int64_t attention_bytes(const fd_attention *a, const fd_rows *w, int threads) {
    return threads * attention_scratch(w, a->heads / a->kv_heads) + 64;
}

static void attention(const fd_attention *a, const fd_rows *w, char *scratch) {
    attention_job j = {.a = a, .w = w, .scratch = scratch};
    fd_parallel(attention_body, &j);
}

typedef struct {
    const char *from;
    int64_t bytes;
    atomic_uint seen;
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
    uint32_t all_of_it = 0;
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < LANES; i++) all_of_it ^= acc[j][i];
    atomic_fetch_xor(&r->seen, all_of_it);
}

static uint32_t read_memory(const void *from, int64_t bytes) {
    memory_read r = {.from = from, .bytes = bytes};
    fd_parallel(memory_read_body, &r);
    return r.seen;
}

const fd_kernels NAME(FD_ISA) = {
    .name = STRING(FD_ISA),
    .decoder_scratch = decoder_only_scratch,
    .decoder_forward = decoder_only_forward,
    .encdec_scratch = encdec_scratch,
    .encdec_forward = encdec_forward,
    .linear_scratch = linear_scratch,
    .linear = linear,
    .attention_scratch = attention_bytes,
    .attention = attention,
    .read_memory = read_memory,
};
