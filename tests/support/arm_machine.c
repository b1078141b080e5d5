/* Runs one function of the native library on a shared file, mapped where the test has it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "foredraft.h"

int fd_select(const char *name);
void fd_set_threads(int n);
int64_t fd_linear_scratch(const fd_weight *w, int rows);
void fd_linear(const fd_linear_args *args);
int64_t fd_attend_scratch(const fd_attention *a, const fd_rows *rows);
void fd_attend(const fd_attention *a, const fd_rows *rows, char *scratch);
int fd_sample(const fd_sampling *job);

enum { NO_SET = 3, NO_MEMORY = 4, SHORT_SCRATCH = 5, UNKNOWN = 6 };

/* file, address and bytes of the memory, instruction set, threads, function, addresses of its arguments, bytes of scratch */
int main(int count, char **words) {
    char *at = (char *)strtoull(words[2], NULL, 10);
    long bytes = atol(words[3]), scratch_bytes = atol(words[count - 1]);
    int file = open(words[1], O_RDWR);
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != at) return NO_MEMORY;
    if (fd_select(words[4])) return NO_SET;
    fd_set_threads(atoi(words[5]));
    void *args[3] = {0};
    for (int i = 7; i < count - 1; i++) args[i - 7] = (void *)strtoull(words[i], NULL, 10);
    if (!strcmp(words[6], "linear")) {
        const fd_linear_args *job = args[0];
        if (fd_linear_scratch(job->weight, job->rows) > scratch_bytes) return SHORT_SCRATCH;
        fd_linear(job);
    } else if (!strcmp(words[6], "attend")) {
        if (fd_attend_scratch(args[0], args[1]) > scratch_bytes) return SHORT_SCRATCH;
        fd_attend(args[0], args[1], args[2]);
    } else if (!strcmp(words[6], "sample")) {
        return fd_sample(args[0]);
    } else {
        return UNKNOWN;
    }
    return 0;
}
