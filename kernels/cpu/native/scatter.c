/* Scatters the rows of one tensor to rows of another: a step's keys or values to their slots in the cache. */
#include <stdint.h>
#include <string.h>

#include "team.h"

enum { TOKENS_PER_CLAIM = 32 };

/* Mirrored in `quire/kernels/cpu/cpu_scatter.py`. */
struct scatter_call {
    char *to;                            /* [num_rows, row_bytes] */
    const char *from;                    /* [tokens, heads, row_bytes] */
    int64_t token_stride, head_stride;   /* bytes */
    const int64_t *rows;                 /* [tokens * heads] rows of `to` */
    int64_t num_rows, row_bytes, tokens, heads;
    int64_t next_token;                  /* counter of the threads; set by the library */
    int64_t outside;                     /* number of rows outside `to`, which are not written */
};

static void scatter_worker(void *argument) {
    struct scatter_call *c = argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&c->next_token, TOKENS_PER_CLAIM, __ATOMIC_RELAXED);
        if (first >= c->tokens) return;
        int64_t last = first + TOKENS_PER_CLAIM < c->tokens ? first + TOKENS_PER_CLAIM : c->tokens;
        for (int64_t token = first; token < last; token++) {
            for (int64_t head = 0; head < c->heads; head++) {
                int64_t row = c->rows[token * c->heads + head];
                if (row < 0 || row >= c->num_rows) {
                    __atomic_fetch_add(&c->outside, 1, __ATOMIC_RELAXED);
                    continue;
                }
                const char *from = c->from + token * c->token_stride + head * c->head_stride;
                memcpy(c->to + row * c->row_bytes, from, (size_t)c->row_bytes);
            }
        }
    }
}

int64_t quire_scatter_bytes(void) { return sizeof(struct scatter_call); }

/* `parallel` is the address of GOMP_parallel; NULL: run on the calling thread alone. */
void quire_scatter(struct scatter_call *call, parallel_function *parallel, int64_t num_threads) {
    call->next_token = call->outside = 0;
    team_run(scatter_worker, call, parallel, call->tokens > TOKENS_PER_CLAIM ? num_threads : 1);
}
