/* Choice of the instruction set, and the exported functions that call its kernels. */
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "team.h"

/* Instruction sets that build.py compiled, the best first. Where one is slow, the next one is the best. */
#define SET(name) extern const fd_kernels fd_##name;
FD_SETS
#undef SET
#define SET(name) &fd_##name,
static const fd_kernels *const available_sets[] = {FD_SETS};
static int is_disabled[sizeof available_sets / sizeof *available_sets];
static const fd_kernels *selected = &fd_portable;

fd_tuning fd_tuned[FD_ROW_CLASSES] = {{0, 8, 256 << 10}, {0, 8, 256 << 10}, {6144, 8, 256 << 10}};

/* Sets the tunings of all classes. Must not be called while a product runs. */
void fd_tune(const fd_tuning *tunings) { memcpy(fd_tuned, tunings, sizeof fd_tuned); }

/* The system saves 8 KiB of tiles at every thread switch, so a process must request them. The permission holds for all
 * threads of the process, running ones included. */
static int can_use_tiles(void) {
#if defined(__x86_64__) && defined(__linux__)
    enum { FEATURES = 7, HAS_AMX = 1 << 22 | 1 << 24 /* bf16, tile */ };
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(FEATURES, 0, &a, &b, &c, &d) || (d & HAS_AMX) != HAS_AMX) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static int can_run(const char *name) {
    if (!strcmp(name, "portable")) return 1;
#ifdef FD_AMX_EMULATED
    if (!strcmp(name, "amx")) return 1;
#endif
#ifdef __x86_64__
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    int avx512bf16 = avx512vnni && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx512vnni")) return avx512vnni;
    if (!strcmp(name, "avx512bf16")) return avx512bf16;
    if (!strcmp(name, "amx")) return avx512bf16 && can_use_tiles();
#endif
#if defined(__aarch64__) && defined(__linux__)
    enum { HAS_I8MM = 1 << 13, HAS_BF16 = 1 << 14 }; /* of AT_HWCAP2 */
    unsigned long wanted = HAS_I8MM | HAS_BF16;
    if (!strcmp(name, "neonbf16")) return (getauxval(AT_HWCAP2) & wanted) == wanted;
#endif
    return 0;
}

/* Intel's cores start a dot product of bf16 every second cycle, and two products of floats in every cycle. */
static int is_slow(const char *name) {
#ifdef __x86_64__
    __builtin_cpu_init();
    return !strcmp(name, "avx512bf16") && __builtin_cpu_is("intel");
#else
    return 0;
#endif
}

static const fd_kernels *find(const char *name) {
    int is_named = name && *name;
    for (size_t i = 0; i < sizeof available_sets / sizeof *available_sets; i++) {
        if (is_named ? strcmp(name, available_sets[i]->name) : is_slow(available_sets[i]->name)) continue;
        if (!is_disabled[i] && can_run(available_sets[i]->name)) return available_sets[i];
    }
    return NULL;
}

/* Excludes a set that computes wrongly on this processor. */
void fd_disable(const char *name) {
    for (size_t i = 0; i < sizeof available_sets / sizeof *available_sets; i++)
        if (!strcmp(name, available_sets[i]->name)) is_disabled[i] = 1;
}

/* Selects a set. Returns 0 if this processor has it. NULL or "" = the best available. */
int fd_select(const char *name) {
    const fd_kernels *found = find(name);
    if (found) selected = found;
    return found ? 0 : -1;
}

/* Computes a product with a given set. Returns 0 if this processor has it. */
int fd_linear_with(const char *name, const fd_linear_args *args) {
    const fd_kernels *found = find(name);
    if (found) found->linear(args);
    return found ? 0 : -1;
}
/* Sets differ in their scratch: bf16 inputs are kept as floats where there are no bf16 products. -1: no such set. */
int64_t fd_linear_scratch_with(const char *name, const fd_weight *w, int rows) {
    const fd_kernels *found = find(name);
    return found ? found->linear_scratch(w, rows) : -1;
}

const char *fd_fingerprint(void) { return FD_FINGERPRINT; }
const char *fd_selected(void) { return selected->name; }
int64_t fd_decoder_scratch(const fd_model *m, const fd_rows *rows) {
    return selected->decoder_scratch(m, rows, fd_num_threads());
}
void fd_decoder_forward(const fd_model *m, const fd_rows *rows, const fd_pass *p) {
    selected->decoder_forward(m, rows, p);
}
int64_t fd_linear_scratch(const fd_weight *w, int rows) { return selected->linear_scratch(w, rows); }
void fd_linear(const fd_linear_args *args) { selected->linear(args); }
int64_t fd_attend_scratch(const fd_attention *a, const fd_rows *rows) {
    return selected->attention_scratch(a, rows, fd_num_threads());
}
void fd_attend(const fd_attention *a, const fd_rows *rows, char *scratch) { selected->attention(a, rows, scratch); }
uint32_t fd_read_memory(const void *from, int64_t bytes) { return selected->read_memory(from, bytes); }
int64_t fd_encdec_scratch(const fd_encdec *m, const fd_rows *rows, const fd_rows *sources) {
    return selected->encdec_scratch(m, rows, sources, fd_num_threads());
}
void fd_encdec_forward(const fd_encdec *m, const fd_rows *rows, const fd_rows *sources, const fd_pass *p) {
    selected->encdec_forward(m, rows, sources, p);
}
void fd_mix(const fd_mixing *job) { selected->mix(job); }
int fd_sample(const fd_sampling *job) { return selected->sample(job); }
int fd_walk_trees(const fd_walks *job) { return selected->walk_trees(job); }
int64_t fd_chain_scratch(const fd_model *m, const fd_chain *c) {
    return selected->chain_scratch(m, c, fd_num_threads());
}
int fd_draft_chains(const fd_model *m, const fd_chain *c, const fd_pass *first) {
    return selected->draft_chains(m, c, first);
}
int64_t fd_step_scratch(const fd_step_network *n, int rows) { return selected->step_scratch(n, rows); }
void fd_forward_step(const fd_step_network *n, const fd_step_pass *p) { selected->forward_step(n, p); }
int64_t fd_step_chain_scratch(const fd_step_network *n, const fd_drafts *d) {
    return selected->step_chain_scratch(n, d);
}
int fd_draft_steps(const fd_step_network *n, const fd_drafts *d, const fd_step_roots *roots) {
    return selected->draft_steps(n, d, roots);
}
int fd_draft_suffix(const fd_suffix_chain *c) { return selected->draft_suffix(c); }
double fd_sum_masses(const void *x, int is_float, int64_t n) { return selected->sum_masses(x, is_float, n); }
void fd_divide_masses(const void *x, int is_float, int64_t n, double total, double *out) {
    selected->divide_masses(x, is_float, n, total, out);
}
void fd_subtract_masses(const double *p, double weight, const double *q, int64_t n, double *out) {
    selected->subtract_masses(p, weight, q, n, out);
}
int64_t fd_sample_mass(const double *mass, int64_t n, double u, double *sums) {
    return selected->sample_mass(mass, n, u, sums);
}
int64_t fd_sizeof(int record) { /* numbered as RECORDS in records.py */
    const int64_t sizes[] = {sizeof(fd_weight),    sizeof(fd_rows),        sizeof(fd_layer),
                             sizeof(fd_model),     sizeof(fd_pass),        sizeof(fd_attention),
                             sizeof(fd_linear_args), sizeof(fd_encdec_layer), sizeof(fd_encdec),
                             sizeof(fd_settings),  sizeof(fd_sampling),    sizeof(fd_drafts),
                             sizeof(fd_chain),     sizeof(fd_step),        sizeof(fd_step_network),
                             sizeof(fd_step_pass), sizeof(fd_step_roots),  sizeof(fd_tuning),
                             sizeof(fd_experts),   sizeof(fd_layer_change), sizeof(fd_adapted),
                             sizeof(fd_images),
                             sizeof(fd_mixer),     sizeof(fd_runs),        sizeof(fd_mixing),
                             sizeof(fd_suffix_chain), sizeof(fd_walk_request), sizeof(fd_walks)};
    return record < (int)(sizeof sizes / sizeof *sizes) ? sizes[record] : 0;
}
