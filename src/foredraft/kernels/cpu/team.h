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

enum { SHARES_PER_MEMBER = 8 };

typedef struct {
    int count, first, last;
} fd_items;

/* Takes the next items of a member: a part of those that are left, so that the counter is changed rarely at first, and
 * the members end together. Returns 0 if there is none. */
static inline int fd_take_items(fd_team *team, fd_items *items) {
    int left = items->count - atomic_load_explicit(&team->next, memory_order_relaxed);
    int size = atomic_load_explicit(&team->size, memory_order_relaxed);
    int share = size == 1 ? left : left / (SHARES_PER_MEMBER * size);
    if (share < 1) share = 1;
    items->first = fd_take(team, share);
    items->last = items->first + share < items->count ? items->first + share : items->count;
    return items->first < items->count;
}

/* Members share the work items 0 to number - 1. */
#define FOR_EACH_ITEM(i, number)                                                    \
    for (fd_items items_of_##i = {.count = (number)}; fd_take_items(team, &items_of_##i);) \
        for (int i = items_of_##i.first; i < items_of_##i.last; i++)

#endif
