/* Threads and the choice of instruction set.
 *
 * torch has an OpenMP runtime whose idle threads spin. A second pool would compete for the cores, so the team uses
 * torch's threads: library.py passes the entry points of the runtime that torch loaded. Without one (clang's runtime
 * under another name, or none) a separate pool takes its place.
 */
#define _GNU_SOURCE
#include "foredraft.h"

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*omp_count)(void);

static gomp_parallel shared_parallel;
static omp_count shared_count;
static _Thread_local int num_threads = 1; /* per caller: another thread must not change it between scratch and pass */

int fd_num_threads(void) { return num_threads; }
void fd_set_threads(int n) { num_threads = n < 1 ? 1 : n; }
void fd_share(void *parallel, void *count) {
    shared_parallel = (gomp_parallel)parallel;
    shared_count = (omp_count)count;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now(void) { /* nanoseconds */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static _Thread_local int64_t waited; /* nanoseconds that a member waited at the barriers of its region */

void fd_barrier(fd_team *team) {
    if (team->size == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    int generation = atomic_load_explicit(&team->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
        return;
    }
    /* the others arrive within a few microseconds, unless the system took their core */
    int64_t began = 0;
    for (int spins = 0; atomic_load_explicit(&team->generation, memory_order_acquire) == generation; spins++) {
        if (spins < 1 << 10) relax();
        else {
            if (!began) began = now();
            sched_yield();
        }
    }
    if (began) waited += now() - began;
}

typedef struct {
    fd_body body;
    void *what;
    fd_team team;
    atomic_ullong cores; /* bit mask of the cores that members run on, of the first 64 */
    _Atomic int64_t idle; /* maximum over the members of (waited - end time of the body) */
} job;

/* The system may wake a thread on its waker's busy core and leave it there for long. So the second thread on a core
 * moves to another one; its affinity is restored afterwards. */
static void spread(job *j) {
#ifdef __linux__
    int core = sched_getcpu();
    if (core < 0 || core >= 64) return;
    unsigned long long taken = atomic_fetch_or_explicit(&j->cores, 1ull << core, memory_order_relaxed);
    if (!(taken >> core & 1)) return;
    cpu_set_t mine, others;
    if (sched_getaffinity(0, sizeof mine, &mine)) return;
    others = mine;
    for (int i = 0; i < 64; i++)
        if (taken >> i & 1) CPU_CLR(i, &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return;
    core = sched_getcpu();
    if (core < 64) atomic_fetch_or_explicit(&j->cores, 1ull << core, memory_order_relaxed);
    sched_setaffinity(0, sizeof mine, &mine);
#else
    (void)j;
#endif
}

static void take_part(job *j) {
    spread(j);
    waited = 0;
    j->body(j->what, &j->team);
    int64_t mine = waited - now(), most = atomic_load_explicit(&j->idle, memory_order_relaxed);
    while (mine > most && !atomic_compare_exchange_weak_explicit(&j->idle, &most, mine, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
    }
}

static void enter(void *of) {
    job *j = of;
    /* the runtime may give fewer threads than requested, and a barrier waits for the actual number */
    atomic_store_explicit(&j->team.size, shared_count(), memory_order_relaxed);
    take_part(j);
}

/* The separate pool. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static job *current;
static int started, wanted, running, round_number;

static void *serve(void *number) {
    int seen = 0, mine = (int)(intptr_t)number;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (round_number == seen) pthread_cond_wait(&wake, &lock);
        seen = round_number;
        if (mine >= wanted) continue;
        job *j = current;
        pthread_mutex_unlock(&lock);
        take_part(j);
        pthread_mutex_lock(&lock);
        if (--running == 0) pthread_cond_signal(&done);
    }
    return NULL;
}

static void own_parallel(job *j) {
    pthread_mutex_lock(&turn);
    pthread_mutex_lock(&lock);
    while (started < j->team.size - 1) {
        pthread_t thread;
        /* a thread joins before its first round is announced */
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(started)) != 0) break;
        pthread_detach(thread);
        started++;
    }
    if (started < j->team.size - 1) j->team.size = started + 1;
    current = j;
    wanted = running = j->team.size - 1;
    round_number++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    take_part(j);
    pthread_mutex_lock(&lock);
    while (running) pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
}

/* A member that loses its core to another program delays the others at every barrier, for milliseconds each; then one
 * thread is faster than several. After a region that one thread would have finished sooner, the caller runs alone for
 * REPAID times the loss, and twice as long as before if it happens again. Before the team gets work again, a region of
 * barriers alone tests it. On idle cores no wait is that long. All values are nanoseconds. */
static const int64_t LATE = 1000000, FIRST_ALONE = 20000000, LAST_ALONE = 5000000000, REPAID = 8;
static _Thread_local int64_t alone_for, alone_until;
static _Thread_local int is_untried; /* the team is not yet tested after running alone */

static void stay_alone(int64_t from, int64_t lost) {
    int is_again = alone_for && from - alone_until < 4 * alone_for;
    alone_for = is_again ? 2 * alone_for : FIRST_ALONE;
    if (alone_for < REPAID * lost) alone_for = REPAID * lost;
    if (alone_for > LAST_ALONE) alone_for = LAST_ALONE;
    alone_until = from + alone_for;
    is_untried = 1;
}

static void together(fd_body body, void *what) {
    job j = {.body = body, .what = what, .idle = INT64_MIN};
    j.team.size = num_threads;
    int64_t began = now();
    if (shared_parallel) shared_parallel(enter, &j, (unsigned)num_threads, 0);
    else own_parallel(&j);
    int64_t ended = now(), idle = atomic_load_explicit(&j.idle, memory_order_relaxed) + ended;
    int64_t busy = ended - began - idle, lost = ended - began - busy * num_threads; /* compared with one thread */
    if (idle > LATE && lost > 0) stay_alone(ended, lost);
}

static void meet(void *what, fd_team *team) {
    (void)what;
    for (int i = 0; i < 4; i++) fd_barrier(team);
}

static int is_alone(void) {
    if (num_threads == 1) return 1;
    if (!is_untried) return 0;
    if (now() < alone_until) return 1;
    is_untried = 0;
    together(meet, NULL);
    return is_untried;
}

void fd_parallel(fd_body body, void *what) {
    if (is_alone()) {
        fd_team team = {.size = 1};
        body(what, &team);
    } else together(body, what);
}

/* Instruction sets that build.py compiled, the best first. */
#define SET(name) extern const fd_kernels fd_##name;
FD_SETS
#undef SET
#define SET(name) &fd_##name,
static const fd_kernels *const all[] = {FD_SETS};
static int is_forbidden[sizeof all / sizeof *all];
static const fd_kernels *chosen = &fd_portable;

/* The system saves 8 KiB of tiles at every thread switch, so a process must request them. The permission holds for all
 * threads of the process, running ones included. */
static int may_use_tiles(void) {
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
    int avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx512bf16")) return avx512bf16;
    if (!strcmp(name, "amx")) return avx512bf16 && may_use_tiles();
#endif
    return 0;
}

static const fd_kernels *find(const char *name) {
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (name && *name && strcmp(name, all[i]->name)) continue;
        if (!is_forbidden[i] && can_run(all[i]->name)) return all[i];
    }
    return NULL;
}

/* Excludes a set that computes wrongly on this processor. */
void fd_forbid(const char *name) {
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(name, all[i]->name)) is_forbidden[i] = 1;
}

/* Selects a set. Returns 0 if this processor has it. NULL or "" = the best available. */
int fd_select(const char *name) {
    const fd_kernels *found = find(name);
    if (found) chosen = found;
    return found ? 0 : -1;
}

/* Computes a product with any set. Returns 0 if this processor has it. */
int fd_linear_by(const char *name, const fd_product *p) {
    const fd_kernels *found = find(name);
    if (found) found->linear(p);
    return found ? 0 : -1;
}

const char *fd_source(void) { return FD_SOURCE; }
const char *fd_selected(void) { return chosen->name; }
int64_t fd_scratch(const fd_model *m, const fd_window *w) { return chosen->scratch(m, w, num_threads); }
void fd_forward(const fd_model *m, const fd_window *w, const fd_pass *p) { chosen->forward(m, w, p); }
int64_t fd_linear_scratch(const fd_weight *w, int rows) { return chosen->linear_scratch(w, rows); }
void fd_linear(const fd_product *p) { chosen->linear(p); }
int64_t fd_attend_scratch(const fd_attention *a, const fd_window *w) {
    return chosen->attention_scratch(a, w, num_threads);
}
void fd_attend(const fd_attention *a, const fd_window *w, char *scratch) { chosen->attention(a, w, scratch); }
uint32_t fd_read(const void *from, int64_t bytes) { return chosen->read(from, bytes); }
int64_t fd_pair_scratch(const fd_pair *m, const fd_window *w, const fd_window *sources) {
    return chosen->pair_scratch(m, w, sources, num_threads);
}
void fd_pair_forward(const fd_pair *m, const fd_window *w, const fd_window *sources, const fd_pair_pass *p) {
    chosen->pair_forward(m, w, sources, p);
}
int64_t fd_sizeof(int what) {
    const int64_t sizes[] = {sizeof(fd_weight), sizeof(fd_window),    sizeof(fd_layer), sizeof(fd_model),
                             sizeof(fd_pass),   sizeof(fd_attention), sizeof(fd_product),
                             sizeof(fd_pair_layer), sizeof(fd_pair), sizeof(fd_pair_pass)};
    return what < (int)(sizeof sizes / sizeof *sizes) ? sizes[what] : 0;
}
