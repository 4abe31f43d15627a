/* Several calls one after the other on one team of threads: between them is a barrier in place of a join and a fork.
 *
 *     thread 0   | norm | qkv ........ | rotate | attention ... | output ..... | ...
 *     thread 1   |  ... | qkv .......... | .... | attention ..... | output ... | ...
 *
 * A call is done when its units are done, whoever did them: a runtime may start fewer threads than it was asked for, or
 * start one when the others have finished, and none of it can leave a barrier waiting. So each call has counters of its own,
 * those of all layers too: a thread may still look at the first when the others are at the last.
 */
#include <sched.h>
#include <time.h>

#include "attention.h"
#include "row_ops.h"
#include "linear.h"

enum {
    MAX_STEPS = 16,
    SPINS = 2048, /* some 40 us; then the core goes to whom the units may be waiting for */
    WARM_ROWS = 16,         /* of a product: with more its weights are not what it waits for */
    WARM_BYTES = 128 << 10, /* within a second-level cache, beside what comes before the product */
};

enum kind { NORM = 0, LINEAR = 1, ROTATE = 2, ATTENTION = 3, GATED = 4 };

/* These three are mirrored in `quire/kernels/cpu/cpu_call_sequence.py` and `cpu_decoder_layer.py`. */
struct step {
    int64_t kind; /* enum kind: which structure `call` is */
    void *call;
};

struct sequence {
    const struct step *steps; /* each with a call of its own, whose counters are set before any runs */
    int64_t num_steps;        /* at most MAX_STEPS */
    int64_t *finished_ns;     /* [1 + num_steps] when it began, and when each step was done; or NULL */
};

/* A decoder layer: its calls in order, and those of them that take what is another in every step. */
struct layer {
    struct sequence *sequence;
    struct norm_call *attention_norm; /* reads what goes in */
    struct rotate_call *rotate;
    struct attention_call *attention;
    struct linear_call *output; /* adds what goes in */
    struct linear_call *down;   /* writes what comes out */
};

struct stage {
    struct job job;
    const struct linear_call *product; /* or NULL */
    int64_t *finished_ns;
    _Alignas(CACHE_LINE) int64_t done; /* units; on a line of its own, because all others wait on it */
};

struct run {
    struct stage *stages;
    int64_t num_stages;
    int64_t joined; /* threads that have begun */
};

/* What a thread asks of memory while it waits: the first weights of its range of the next product. */
struct warming {
    const struct stage *stage; /* of the product, or the end of the run */
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

/* The product that comes after a stage, if it has begun with another one; nothing where the weights are not what takes its time. */
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

/* Return when all that the stage's units wrote can be read. */
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
    }
}

/* A sequence's stages, to be run as its entry points would run the calls. */
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

/* The calls in order. `num_threads`: at most what attention has scratch for. */
void quire_sequence(struct sequence *sequence, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct stage stages[MAX_STEPS];
    struct run run = {stages, sequence->num_steps, 0};
    if (sequence->finished_ns) sequence->finished_ns[0] = now_ns();
    prepare_stages(stages, sequence, isa, num_threads);
    team_run(run_worker, &run, parallel, num_threads);
}

int64_t quire_layer_bytes(void) { return sizeof(struct layer); }

int64_t quire_stage_bytes(void) { return sizeof(struct stage); }

/* Layers one after the other: the first reads `x`, all write `out`, which the next one reads; both [tokens, hidden]. `stages`:
 * memory for one of each of their calls, 64-byte aligned. Returns the rows that the pages do not have, which are not written. */
int64_t quire_layers(const struct layer *layers, int64_t num_layers, const char *x, char *out, const struct rotate_step *step,
                     const struct attention_plan *plan, struct stage *stages, int64_t isa, parallel_function *parallel,
                     int64_t num_threads) {
    struct run run = {stages, 0, 0};
    for (const struct layer *layer = layers; layer < layers + num_layers; layer++, x = out) {
        layer->attention_norm->x = layer->output->residual = x;
        layer->down->out = out; /* last of all: what went in is no longer needed */
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
