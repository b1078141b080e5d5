/* Interface of suffix.c for the code that depends on the instruction set. */
#ifndef FD_SUFFIX_H
#define FD_SUFFIX_H

#include <stdint.h>

enum { MAX_CONTINUATIONS = 64 }; /* different tokens in a distribution */

typedef struct fd_suffix fd_suffix;

/* Longest suffix of a sequence that occurs in an automaton. */
typedef struct {
    const fd_suffix *text;
    int32_t state, length;
} fd_match;

/* Blends the contexts of all matches into one distribution, the likeliest token first. Returns the number of tokens.
 * Modifies `matches`. Arrays: [MAX_CONTINUATIONS]. */
int32_t fd_suffix_predict(fd_match *matches, int32_t num, const double *discounts, int32_t *tokens, double *probs);

/* Advances all matches by more tokens of the sequence. */
void fd_suffix_advance(fd_match *matches, int32_t num, const int32_t *tokens, int64_t count);

#endif
