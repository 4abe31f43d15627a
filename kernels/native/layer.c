/* Entry points of what lies between a layer's matrix products. */
#include "layer.h"

/* A team costs a few microseconds to start: fewer elements than this are not worth it. */
enum { MIN_PARALLEL_ELEMENTS = 32768 };

static void run(void (*worker)(void *), void *call, struct team **team, int64_t rows, int64_t elements,
                parallel_function *parallel, int64_t num_threads) {
    struct team own;
    if (elements < MIN_PARALLEL_ELEMENTS) num_threads = 1;
    team_divide(&own, (rows + UNIT_ROWS - 1) / UNIT_ROWS, num_threads);
    *team = &own;
    team_run(worker, call, parallel, num_threads);
}

#if defined(__x86_64__)
#define BEST(function, isa) ((isa) >= AVX512 ? function##_avx512 : (isa) == AVX2 ? function##_avx2 : function##_generic)
#else
#define BEST(function, isa) ((void)(isa), function##_generic)
#endif

int64_t quire_norm_bytes(void) { return sizeof(struct norm_call); }

int64_t quire_gated_bytes(void) { return sizeof(struct gated_call); }

int64_t quire_rotate_bytes(void) { return sizeof(struct rotate_call); }

/* Arguments of the three as of quire_attention. */
void quire_norm(struct norm_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    run(BEST(quire_norm, isa), call, &call->team, call->rows, call->rows * call->columns, parallel, num_threads);
}

void quire_gated(struct gated_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    run(BEST(quire_gated, isa), call, &call->team, call->rows, call->rows * call->columns, parallel, num_threads);
}

void quire_rotate(struct rotate_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    call->outside = 0;
    int64_t elements = call->tokens * (call->heads + 2 * call->kv_heads) * call->head_dim;
    run(BEST(quire_rotate, isa), call, &call->team, call->tokens, elements, parallel, num_threads);
}
