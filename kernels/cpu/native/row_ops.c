/* Entry points of the row operations: norm, gated activation, rotation with KV write. */
#include "row_ops.h"

/* Starting a team takes a few microseconds, which does not pay for fewer elements. */
enum { MIN_PARALLEL_ELEMENTS = 32768 };

/* Set up a job. The caller sets the call's pointer to the team. */
static void divide(struct job *job, int64_t (*worker)(void *), void *call, int64_t rows, int64_t elements, int64_t num_threads) {
    job->worker = worker;
    job->call = call;
    job->units = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    job->num_threads = elements < MIN_PARALLEL_ELEMENTS ? 1 : num_threads;
    team_divide(&job->team, job->units, num_threads);
}

#if defined(__x86_64__)
#define BEST(function, isa) ((isa) >= AVX512 ? function##_avx512 : (isa) == AVX2 ? function##_avx2 : function##_generic)
#else
#define BEST(function, isa) ((void)(isa), function##_generic)
#endif

int64_t quire_norm_bytes(void) { return sizeof(struct norm_call); }

int64_t quire_gated_bytes(void) { return sizeof(struct gated_call); }

int64_t quire_rotate_bytes(void) { return sizeof(struct rotate_call); }

void quire_norm_job(struct job *job, struct norm_call *call, int64_t isa, int64_t num_threads) {
    divide(job, BEST(quire_norm, isa), call, call->rows, call->rows * call->columns, num_threads);
    call->team = &job->team;
}

void quire_gated_job(struct job *job, struct gated_call *call, int64_t isa, int64_t num_threads) {
    divide(job, BEST(quire_gated, isa), call, call->rows, call->rows * call->columns, num_threads);
    call->team = &job->team;
}

void quire_rotate_job(struct job *job, struct rotate_call *call, int64_t isa, int64_t num_threads) {
    int64_t elements = call->step.tokens * (call->heads + 2 * call->kv_heads) * call->head_dim;
    divide(job, BEST(quire_rotate, isa), call, call->step.tokens, elements, num_threads);
    call->team = &job->team;
    call->outside = 0;
}

/* `parallel` is the address of GOMP_parallel; NULL: run on the calling thread alone. At most `num_threads` threads run the call. */
#define ENTRY(name, call_struct) \
    void name(struct call_struct *call, int64_t isa, parallel_function *parallel, int64_t num_threads) { \
        struct job job; \
        name##_job(&job, call, isa, num_threads); \
        job_run(&job, parallel); \
    }
ENTRY(quire_norm, norm_call)
ENTRY(quire_gated, gated_call)
ENTRY(quire_rotate, rotate_call)
