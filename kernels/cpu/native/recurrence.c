/* Entry points of recurrent layers: short convolution, state scan. */
#include "recurrence.h"

#if defined(__x86_64__)
#define BEST(function, isa) ((isa) >= AVX512 ? function##_avx512 : (isa) == AVX2 ? function##_avx2 : function##_generic)
#else
#define BEST(function, isa) ((void)(isa), function##_generic)
#endif

/* Starting a team takes a few microseconds, which does not pay for fewer elements. */
enum { MIN_PARALLEL_ELEMENTS = 32768 };

int64_t quire_conv_bytes(void) { return sizeof(struct conv_call); }

int64_t quire_scan_bytes(void) { return sizeof(struct scan_call); }

static void run(struct job *job, int64_t (*worker)(void *), void *call, int64_t units, int64_t elements, parallel_function *parallel, int64_t num_threads) {
    job->worker = worker;
    job->call = call;
    job->units = units;
    job->num_threads = elements < MIN_PARALLEL_ELEMENTS ? 1 : num_threads;
    team_divide(&job->team, units, num_threads);
    job_run(job, parallel);
}

void quire_conv(struct conv_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct job job;
    int64_t tokens = call->rows.cu_q[call->rows.rows];
    call->team = &job.team;
    run(&job, BEST(quire_conv, isa), call, call->rows.rows * ((call->channels + CONV_BLOCK - 1) / CONV_BLOCK), tokens * call->channels, parallel,
        num_threads);
}

void quire_scan(struct scan_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct job job;
    int64_t tokens = call->rows.cu_q[call->rows.rows];
    int64_t blocks = (call->value_dim + SCAN_BLOCK - 1) / SCAN_BLOCK;
    call->team = &job.team;
    run(&job, BEST(quire_scan, isa), call, call->rows.rows * call->heads * blocks, tokens * call->heads * call->key_dim * call->value_dim, parallel,
        num_threads);
}
