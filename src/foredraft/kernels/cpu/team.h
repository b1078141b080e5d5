/* The thread team: members run one function, share work items and meet at barriers. */
#ifndef FD_TEAM_H
#define FD_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    atomic_int size, arrived, generation, next;
} fd_team;

/* Every member calls body(arg, team). `next` counts the work items; a barrier resets it to zero. */
typedef void (*fd_body)(void *arg, fd_team *team);
void fd_parallel(fd_body body, void *arg);
void fd_barrier(fd_team *team);
int fd_num_threads(void);
/* Memory of the calling thread, aligned to a cache line, until its next call or its end; NULL if there is none. */
void *fd_thread_memory(int64_t bytes);

static inline int fd_take(fd_team *team, int count) {
    return atomic_fetch_add_explicit(&team->next, count, memory_order_relaxed);
}

/* Members share the work items 0 to count - 1. */
#define FOR_EACH_ITEM(i, count) for (int i; (i = fd_take(team, 1)) < (count);)

#endif
