/* The thread team.
 *
 * torch has an OpenMP runtime whose idle threads spin. A second pool would compete for the cores, so the team uses
 * torch's threads: library.py passes the entry points of the runtime that torch loaded. Without one (clang's runtime
 * under another name, or none) a separate pool takes its place.
 */
#define _GNU_SOURCE
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef void (*gomp_parallel_function)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*omp_num_threads_function)(void);

static gomp_parallel_function openmp_parallel;
static omp_num_threads_function openmp_num_threads;
static _Thread_local int num_threads = 1; /* per caller: another thread must not change it between scratch and pass */

int fd_num_threads(void) { return num_threads; }
void fd_set_threads(int n) { num_threads = n < 1 ? 1 : n; }
void fd_use_openmp(void *parallel, void *count) {
    openmp_parallel = (gomp_parallel_function)parallel;
    openmp_num_threads = (omp_num_threads_function)count;
}

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static _Thread_local int64_t waited_ns; /* nanoseconds that a member waited at the barriers of its region */

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
        if (spins < 1 << 10) cpu_relax();
        else {
            if (!began) began = now_ns();
            sched_yield();
        }
    }
    if (began) waited_ns += now_ns() - began;
}

typedef struct {
    fd_body body;
    void *arg;
    fd_team team;
    atomic_ullong used_cores; /* bit mask of the cores that members run on, of the first 64 */
    _Atomic int64_t idle; /* maximum over the members of (waited - end time of the body) */
} job;

/* The system may wake a thread on its waker's busy core and leave it there for long. So the second thread on a core
 * moves to another one; its affinity is restored afterwards. */
static void leave_shared_core(job *j) {
#ifdef __linux__
    int core = sched_getcpu();
    if (core < 0 || core >= 64) return;
    unsigned long long used = atomic_fetch_or_explicit(&j->used_cores, 1ull << core, memory_order_relaxed);
    if (!(used >> core & 1)) return;
    cpu_set_t own, free_cores;
    if (sched_getaffinity(0, sizeof own, &own)) return;
    free_cores = own;
    for (int i = 0; i < 64; i++)
        if (used >> i & 1) CPU_CLR(i, &free_cores);
    if (!CPU_COUNT(&free_cores) || sched_setaffinity(0, sizeof free_cores, &free_cores)) return;
    core = sched_getcpu();
    if (core < 64) atomic_fetch_or_explicit(&j->used_cores, 1ull << core, memory_order_relaxed);
    sched_setaffinity(0, sizeof own, &own);
#else
    (void)j;
#endif
}

static void run_member(job *j) {
    leave_shared_core(j);
    waited_ns = 0;
    j->body(j->arg, &j->team);
    int64_t own = waited_ns - now_ns(), max = atomic_load_explicit(&j->idle, memory_order_relaxed);
    while (own > max && !atomic_compare_exchange_weak_explicit(&j->idle, &max, own, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
    }
}

static void openmp_member(void *of) {
    job *j = of;
    /* the runtime may give fewer threads than requested, and a barrier waits for the actual number */
    atomic_store_explicit(&j->team.size, openmp_num_threads(), memory_order_relaxed);
    run_member(j);
}

/* Memory of each thread that ran a sampler. A new allocation for every step would be zeroed page by page. */
typedef struct {
    int64_t bytes;
    char data[];
} thread_memory;

static pthread_once_t memory_once = PTHREAD_ONCE_INIT;
static pthread_key_t memory_key;
static void create_memory_key(void) { pthread_key_create(&memory_key, free); }

void *fd_thread_memory(int64_t bytes) {
    pthread_once(&memory_once, create_memory_key);
    thread_memory *memory = pthread_getspecific(memory_key);
    if (!memory || memory->bytes < bytes) {
        free(memory);
        memory = malloc(sizeof *memory + (size_t)bytes + 64);
        pthread_setspecific(memory_key, memory);
        if (!memory) return NULL;
        memory->bytes = bytes;
    }
    return (void *)(((uintptr_t)memory->data + 63) & ~(uintptr_t)63);
}

/* The separate pool. */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_ready = PTHREAD_COND_INITIALIZER, work_done = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static job *current_job;
static int num_workers, num_wanted, num_running, region_number;

static void *worker_main(void *number) {
    int last_region = 0, own = (int)(intptr_t)number;
    pthread_mutex_lock(&pool_lock);
    for (;;) {
        while (region_number == last_region) pthread_cond_wait(&work_ready, &pool_lock);
        last_region = region_number;
        if (own >= num_wanted) continue;
        job *j = current_job;
        pthread_mutex_unlock(&pool_lock);
        run_member(j);
        pthread_mutex_lock(&pool_lock);
        if (--num_running == 0) pthread_cond_signal(&work_done);
    }
    return NULL;
}

static void pool_parallel(job *j) {
    pthread_mutex_lock(&region_lock);
    pthread_mutex_lock(&pool_lock);
    while (num_workers < j->team.size - 1) {
        pthread_t thread;
        /* a thread joins before its first round is announced */
        if (pthread_create(&thread, NULL, worker_main, (void *)(intptr_t)(num_workers)) != 0) break;
        pthread_detach(thread);
        num_workers++;
    }
    if (num_workers < j->team.size - 1) j->team.size = num_workers + 1;
    current_job = j;
    num_wanted = num_running = j->team.size - 1;
    region_number++;
    pthread_cond_broadcast(&work_ready);
    pthread_mutex_unlock(&pool_lock);
    run_member(j);
    pthread_mutex_lock(&pool_lock);
    while (num_running) pthread_cond_wait(&work_done, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
    pthread_mutex_unlock(&region_lock);
}

/* A member that loses its core to another program delays the others at every barrier, for milliseconds each; then one
 * thread is faster than several. After a region that one thread would have finished sooner, the caller runs alone for
 * LOSS_FACTOR times the loss, and twice as long as before if it happens again. Before the team gets work again, a
 * region of barriers alone tests it. On idle cores no wait is that long. All values are nanoseconds. */
static const int64_t MAX_WAIT_NS = 1000000, FIRST_SERIAL_NS = 20000000, MAX_SERIAL_NS = 5000000000, LOSS_FACTOR = 8;
static _Thread_local int64_t serial_ns, serial_until;
static _Thread_local int is_untested; /* the team is not yet tested after running alone */

static void start_serial_mode(int64_t from, int64_t lost) {
    int is_again = serial_ns && from - serial_until < 4 * serial_ns;
    serial_ns = is_again ? 2 * serial_ns : FIRST_SERIAL_NS;
    if (serial_ns < LOSS_FACTOR * lost) serial_ns = LOSS_FACTOR * lost;
    if (serial_ns > MAX_SERIAL_NS) serial_ns = MAX_SERIAL_NS;
    serial_until = from + serial_ns;
    is_untested = 1;
}

static void run_team(fd_body body, void *arg) {
    job j = {.body = body, .arg = arg, .idle = INT64_MIN};
    j.team.size = num_threads;
    int64_t began = now_ns();
    if (openmp_parallel) openmp_parallel(openmp_member, &j, (unsigned)num_threads, 0);
    else pool_parallel(&j);
    int64_t ended = now_ns(), idle = atomic_load_explicit(&j.idle, memory_order_relaxed) + ended;
    int64_t busy = ended - began - idle, lost = ended - began - busy * num_threads; /* compared with one thread */
    if (idle > MAX_WAIT_NS && lost > 0) start_serial_mode(ended, lost);
}

static void run_barriers(void *arg, fd_team *team) {
    (void)arg;
    for (int i = 0; i < 4; i++) fd_barrier(team);
}

static int must_start_serial_mode(void) {
    if (num_threads == 1) return 1;
    if (!is_untested) return 0;
    if (now_ns() < serial_until) return 1;
    is_untested = 0;
    run_team(run_barriers, NULL);
    return is_untested;
}

void fd_parallel(fd_body body, void *arg) {
    if (must_start_serial_mode()) {
        fd_team team = {.size = 1};
        body(arg, &team);
    } else run_team(body, arg);
}

