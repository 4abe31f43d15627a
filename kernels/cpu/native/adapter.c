/* Entry points of the low-rank adapters. */
#include "adapter.h"

#if defined(__x86_64__)
#define BEST(function, isa) ((isa) >= AVX512 ? function##_avx512 : (isa) == AVX2 ? function##_avx2 : function##_generic)
#else
#define BEST(function, isa) ((void)(isa), function##_generic)
#endif

int64_t quire_adapter_bytes(void) { return sizeof(struct adapter_call); }

/* Units of `down`: for each piece and each merged layer, the blocks of ranks. */
void quire_adapter_down_job(struct job *job, struct adapter_call *call, int64_t isa, int64_t num_threads) {
    job->worker = BEST(quire_adapter_down, isa);
    job->call = call;
    job->units = call->step->num_pieces * call->num_parts * adapter_rank_blocks(call);
    job->num_threads = num_threads;
    team_divide(&job->team, job->units, num_threads);
    call->team = &job->team;
}

/* Units of `up`: for each piece the panels of all merged layers. */
void quire_adapter_up_job(struct job *job, struct adapter_call *call, int64_t isa, int64_t num_threads) {
    int64_t panels = 0;
    for (int64_t part = 0; part < call->num_parts; part++) panels += adapter_panels(call->columns[part]);
    job->worker = BEST(quire_adapter_up, isa);
    job->call = call;
    job->units = call->step->num_pieces * panels;
    job->num_threads = num_threads;
    team_divide(&job->team, job->units, num_threads);
    call->team = &job->team;
}

/* `parallel` is the address of GOMP_parallel; NULL: run on the calling thread alone. At most `num_threads` threads run the call. */
#define ENTRY(name) \
    void name(struct adapter_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) { \
        struct job job; \
        name##_job(&job, call, isa, num_threads); \
        job_run(&job, parallel); \
    }
ENTRY(quire_adapter_down)
ENTRY(quire_adapter_up)
