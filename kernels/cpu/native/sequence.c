/* Runs several calls one after the other on one team of threads, with a barrier between them instead of a join and a fork.
 *
 *     thread 0   | norm | qkv ........ | rotate | attention ... | output ..... | ...
 *     thread 1   |  ... | qkv .......... | .... | attention ..... | output ... | ...
 *
 * A call is complete when its units are complete; the number of threads does not matter. So a barrier cannot wait forever if the runtime starts
 * fewer threads than requested, or starts one when the others have finished. Each call of all layers has counters of its own, because a late
 * thread may still read the first call's counters when the others are at the last call.
 */
#include <sched.h>
#include <time.h>

#include "adapter.h"
#include "attention.h"
#include "row_ops.h"
#include "linear.h"

enum {
    MAX_STEPS = 20,
    SPINS = 2048, /* about 40 us; then the thread yields its core, which a thread with unfinished units may need */
    WARM_ROWS = 16,         /* most rows of a GEMM whose weights are prefetched: with more rows it is not limited by memory */
    WARM_BYTES = 128 << 10, /* fits the L2 cache together with the data of the calls before the GEMM */
};

enum kind { NORM = 0, LINEAR = 1, ROTATE = 2, ATTENTION = 3, GATED = 4, ADAPTER_DOWN = 5, ADAPTER_UP = 6 };

/* These three are mirrored in `quire/kernels/cpu/cpu_call_sequence.py` and `cpu_decoder_layer.py`. */
struct step {
    int64_t kind; /* enum kind: which structure `call` is */
    void *call;
};

struct sequence {
    const struct step *steps; /* each with its own call; all counters are set before any call runs */
    int64_t num_steps;        /* at most MAX_STEPS */
    int64_t *finished_ns;     /* [1 + num_steps] times of the start and of the end of each step; or NULL */
};

/* A decoder layer: its calls in order, and the calls whose arguments change with every step of the model. */
struct layer {
    struct sequence *sequence;
    struct norm_call *attention_norm; /* reads the layer's input */
    struct rotate_call *rotate;
    struct attention_call *attention;
    struct linear_call *output; /* adds the layer's input */
    struct linear_call *down;   /* writes the layer's output */
    struct adapter_call *down_adapters; /* changes the layer's output; or NULL */
};

struct stage {
    struct job job;
    const struct linear_call *product; /* or NULL */
    int64_t *finished_ns;
    _Alignas(CACHE_LINE) int64_t done; /* completed units; on its own cache line, because all other threads wait for it */
};

struct run {
    struct stage *stages;
    int64_t num_stages;
    int64_t joined; /* threads that have begun */
};

/* Prefetches of a waiting thread: the first weights of its range of the next GEMM. */
struct warming {
    const struct stage *stage; /* stage of the GEMM, or the end of the run */
    const char *line, *end;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

_Thread_local int64_t quire_place = -1;

/* Set the prefetches for the first GEMM at or after a stage, unless they are set already. There are none if the GEMM is not limited by memory. */
static void warm_next(struct warming *w, const struct run *run, const struct stage *stage) {
    const struct stage *end = run->stages + run->num_stages;
    if (w->stage >= stage) return;
    while (stage < end && !stage->product) stage++;
    *w = (struct warming){stage, NULL, NULL};
    if (stage == end || stage->product->rows > WARM_ROWS) return;
    const struct linear_call *c = stage->product;
    const struct range *own = &c->team->ranges[quire_place % c->team->num_ranges];
    const int64_t first = __atomic_load_n(&own->next, __ATOMIC_RELAXED); /* the stage may have begun by now */
    const int64_t panel_bytes = linear_panel_bytes(c, c->steps), bytes = (own->end - first) * panel_bytes;
    w->line = c->weight + first * panel_bytes;
    w->end = w->line + (bytes < WARM_BYTES ? bytes : WARM_BYTES);
}

/* Wait until all units of the stage are complete and their results are visible. */
static void wait_for(const struct stage *stage, struct warming *w) {
    int spins = 0;
    while (__atomic_load_n(&stage->done, __ATOMIC_ACQUIRE) < stage->job.units) {
        if (w->line < w->end) {
            __builtin_prefetch(w->line, 0, 2);
            w->line += CACHE_LINE;
        } else if (spins < SPINS) {
            spins++;
            relax();
        } else {
            sched_yield();
        }
    }
}

static void run_worker(void *argument) {
    struct run *run = argument;
    struct warming warming = {run->stages, NULL, NULL};
    quire_place = __atomic_fetch_add(&run->joined, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < run->num_stages; i++) {
        struct stage *stage = &run->stages[i];
        if (i) {
            warm_next(&warming, run, stage);
            wait_for(stage - 1, &warming);
        }
        int64_t units = stage->job.worker(stage->job.call);
        if (!units) continue;
        int64_t done = __atomic_add_fetch(&stage->done, units, __ATOMIC_ACQ_REL);
        if (stage->finished_ns && done == stage->job.units) *stage->finished_ns = now_ns();
    }
    quire_place = -1;
}

static void prepare(struct job *job, const struct step *step, int64_t isa, int64_t num_threads) {
    switch (step->kind) {
        case NORM: quire_norm_job(job, step->call, isa, num_threads); break;
        case LINEAR: quire_linear_job(job, step->call, isa, num_threads); break;
        case ROTATE: quire_rotate_job(job, step->call, isa, num_threads); break;
        case ATTENTION: quire_attention_job(job, step->call, isa, num_threads); break;
        case GATED: quire_gated_job(job, step->call, isa, num_threads); break;
        case ADAPTER_DOWN: quire_adapter_down_job(job, step->call, isa, num_threads); break;
        case ADAPTER_UP: quire_adapter_up_job(job, step->call, isa, num_threads); break;
    }
}

/* Prepare the stages of a sequence, in the same way as the entry points of the calls. */
static void prepare_stages(struct stage *stages, const struct sequence *sequence, int64_t isa, int64_t num_threads) {
    for (int64_t i = 0; i < sequence->num_steps; i++) {
        prepare(&stages[i].job, &sequence->steps[i], isa, num_threads);
        stages[i].product = sequence->steps[i].kind == LINEAR ? sequence->steps[i].call : NULL;
        stages[i].finished_ns = sequence->finished_ns ? sequence->finished_ns + 1 + i : NULL;
        stages[i].done = 0;
    }
}

int64_t quire_sequence_bytes(void) { return sizeof(struct sequence); }

int64_t quire_sequence_max_steps(void) { return MAX_STEPS; }

/* Run the calls in order. `num_threads` is at most the number for which attention has scratch memory. */
void quire_sequence(struct sequence *sequence, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct stage stages[MAX_STEPS];
    struct run run = {stages, sequence->num_steps, 0};
    if (sequence->finished_ns) sequence->finished_ns[0] = now_ns();
    prepare_stages(stages, sequence, isa, num_threads);
    team_run(run_worker, &run, parallel, num_threads);
}

int64_t quire_layer_bytes(void) { return sizeof(struct layer); }

int64_t quire_stage_bytes(void) { return sizeof(struct stage); }

/* Run layers one after the other. The first one reads `x`; all write `out`, which the next one reads; both are [tokens, hidden]. `stages` has one
 * stage for each call of all layers, 64-byte aligned. Returns the number of rows outside the cache, which are not written. */
int64_t quire_layers(const struct layer *layers, int64_t num_layers, const char *x, char *out, const struct rotate_step *step,
                     const struct attention_plan *plan, struct stage *stages, int64_t isa, parallel_function *parallel,
                     int64_t num_threads) {
    struct run run = {stages, 0, 0};
    for (const struct layer *layer = layers; layer < layers + num_layers; layer++, x = out) {
        layer->attention_norm->x = layer->output->residual = x;
        layer->down->out = out; /* the layer's input is no longer needed */
        if (layer->down_adapters) layer->down_adapters->out = out;
        layer->rotate->step = *step;
        layer->attention->plan = *plan;
        prepare_stages(stages + run.num_stages, layer->sequence, isa, num_threads);
        run.num_stages += layer->sequence->num_steps;
    }
    team_run(run_worker, &run, parallel, num_threads);
    int64_t outside = 0;
    for (const struct layer *layer = layers; layer < layers + num_layers; layer++) outside += layer->rotate->outside;
    return outside;
}
