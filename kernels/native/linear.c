/* Entry points of the packed matrix product: packing, reading back, multiplying. */
#include <string.h>
#include <unistd.h>

#include "linear.h"

enum {
    BLOCK_STEPS = 16,           /* a cache line of a source row */
    TWO_CHUNKS_BYTES = 48 << 10, /* of a first-level cache: one chunk, and of the next what has come when it is begun */
};

/* Mirrored in `quire/kernels/cpu_linear.py`, as linear_call is. */
struct pack_call {
    uint32_t *packed;        /* [panels, steps, PANEL_COLUMNS], or in strips, as linear_call has it */
    int64_t in_strips;
    const char *rows;        /* [columns, steps] of 32 bits: the weight, or part of one */
    int64_t row_stride;      /* bytes */
    int64_t columns, steps;
    int64_t first_column;    /* where the part begins in `packed` */
    int64_t next_panel;      /* counter of the threads; set by the library */
};

/* The part's columns of one panel after the other, in squares that stay in the first-level cache. */
static void pack_worker(void *argument) {
    struct pack_call *c = argument;
    int64_t end_column = c->first_column + c->columns;
    for (;;) {
        int64_t panel = c->first_column / PANEL_COLUMNS + __atomic_fetch_add(&c->next_panel, 1, __ATOMIC_RELAXED);
        int64_t first = panel * PANEL_COLUMNS, begin = first < c->first_column ? c->first_column : first;
        int64_t end = first + PANEL_COLUMNS < end_column ? first + PANEL_COLUMNS : end_column;
        if (begin >= end) return;
        uint32_t *to = c->packed + panel * c->steps * PANEL_COLUMNS;
        for (int64_t step = 0; step < c->steps; step += BLOCK_STEPS) {
            int64_t count = c->steps - step < BLOCK_STEPS ? c->steps - step : BLOCK_STEPS;
            for (int64_t column = begin; column < end; column++) {
                uint32_t line[BLOCK_STEPS];
                const char *row = c->rows + (column - c->first_column) * c->row_stride;
                memcpy(line, row + step * 4, (size_t)count * 4);
                struct place at = linear_place(c->in_strips, c->steps, column - first);
                for (int64_t s = 0; s < count; s++) to[at.begin + (step + s) * at.step] = line[s];
            }
        }
    }
}

int64_t quire_linear_bytes(void) { return sizeof(struct linear_call); }

int64_t quire_pack_bytes(void) { return sizeof(struct pack_call); }

/* `parallel` as in quire_attention. */
void quire_pack(struct pack_call *call, parallel_function *parallel, int64_t num_threads) {
    call->next_panel = 0;
    team_run(pack_worker, call, parallel, num_threads);
}

/* rows[i] = the weight's row ids[i]; `rows` [count, steps] of 32 bits, contiguous. Returns how many ids are not between 0 and `columns` - 1,
 * whose rows stay as they are. */
int64_t quire_unpack_rows(const uint32_t *packed, int64_t in_strips, int64_t steps, int64_t columns, const int64_t *ids, int64_t count,
                          uint32_t *rows) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= columns) {
            outside++;
            continue;
        }
        struct place at = linear_place(in_strips, steps, ids[i] % PANEL_COLUMNS);
        const uint32_t *from = packed + ids[i] / PANEL_COLUMNS * steps * PANEL_COLUMNS + at.begin;
        for (int64_t step = 0; step < steps; step++) rows[i * steps + step] = from[step * at.step];
    }
    return outside;
}

/* Of the first-level data cache; 0 where the system does not tell. */
static int64_t first_level_bytes(void) {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    static int64_t bytes = -1; /* whoever asks at the same time stores the same */
    int64_t known = __atomic_load_n(&bytes, __ATOMIC_RELAXED);
    if (known < 0) {
        known = sysconf(_SC_LEVEL1_DCACHE_SIZE);
        known = known < 0 ? 0 : known;
        __atomic_store_n(&bytes, known, __ATOMIC_RELAXED);
    }
    return known;
#else
    return 0;
#endif
}

void quire_linear_job(struct job *job, struct linear_call *call, int64_t isa, int64_t num_threads) {
    int64_t (*worker)(void *) = quire_linear_generic;
    call->unit_rows = MAX_UNIT_ROWS;
    call->holds_two_chunks = first_level_bytes() >= TWO_CHUNKS_BYTES;
#if defined(__x86_64__)
    if (isa == AVX2) worker = quire_linear_avx2;
    if (isa >= AVX512) worker = quire_linear_avx512;
    if (isa >= AVX512_BF16 && call->dtype == BFLOAT16) worker = quire_linear_avx512_bf16;
#if HAS_AMX
    if (isa == AMX_BF16 && call->dtype == BFLOAT16) {
        worker = quire_linear_amx;
        if (call->steps <= TALL_UNIT_STEPS) call->unit_rows = MAX_TALL_UNIT_ROWS;
    }
#endif
#else
    (void)isa;
#endif
    int64_t panels = linear_panels(call);
    job->worker = worker;
    job->call = call;
    job->units = panels * linear_row_blocks(call);
    job->num_threads = panels < 2 ? 1 : num_threads;
    team_divide(&job->team, job->units, num_threads);
    call->team = &job->team;
}

/* Multiply. `parallel` as in quire_attention. */
void quire_linear(struct linear_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct job job;
    quire_linear_job(&job, call, isa, num_threads);
    job_run(&job, parallel);
}
