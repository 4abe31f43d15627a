/* Entry points of the packed GEMM: pack, unpack, multiply. */
#include <string.h>
#include <unistd.h>

#include "linear.h"

enum {
    TWO_CHUNKS_BYTES = 48 << 10, /* L1 cache that holds one chunk and the part of the next one that has arrived when it begins */
};

/* Mirrored in `quire/kernels/cpu/weight_panels.py`. */
struct pack_call {
    uint32_t *packed;        /* [panels, steps, PANEL_COLUMNS], or in strips, as in linear_call */
    int64_t in_strips;
    const char *rows;        /* [columns, steps] of 32 bits: the weight, or a part of it */
    int64_t row_stride;      /* bytes */
    int64_t columns, steps;
    int64_t first_column;    /* first column of the part in `packed` */
    int64_t next_panel;      /* counter of the threads; set by the library */
};

/* Pack the columns of the part, one panel after the other. */
static void pack_worker(void *argument) {
    struct pack_call *c = argument;
    int64_t end_column = c->first_column + c->columns;
    for (;;) {
        int64_t panel = c->first_column / PANEL_COLUMNS + __atomic_fetch_add(&c->next_panel, 1, __ATOMIC_RELAXED);
        int64_t first = panel * PANEL_COLUMNS, begin = first < c->first_column ? c->first_column : first;
        int64_t end = first + PANEL_COLUMNS < end_column ? first + PANEL_COLUMNS : end_column;
        if (begin >= end) return;
        const char *rows = c->rows + (begin - c->first_column) * c->row_stride;
        linear_pack_panel(c->packed + panel * c->steps * PANEL_COLUMNS, c->in_strips, c->steps, rows, c->row_stride, begin - first, end - first);
    }
}

int64_t quire_linear_bytes(void) { return sizeof(struct linear_call); }

int64_t quire_pack_bytes(void) { return sizeof(struct pack_call); }

/* `parallel` is the address of GOMP_parallel; NULL: run on the calling thread alone. */
void quire_pack(struct pack_call *call, parallel_function *parallel, int64_t num_threads) {
    call->next_panel = 0;
    team_run(pack_worker, call, parallel, num_threads);
}

static void decode_column(struct reader r, int64_t steps, int64_t column, uint32_t *row) {
    const int64_t place = code_place(column / LANES, column % LANES * 2); /* the second element of the pair is next to it */
    for (; r.step < steps; r.step++, r.now += CODED_STEP_BYTES) {
        uint32_t high[2], low[2];
        const int is_apart = r.step == *r.apart;
        for (int i = 0; i < 2; i++) {
            const uint8_t numbers = r.now[(place + i) % NUMBER_BYTES];
            high[i] = is_apart ? r.high[place + i] : r.table[place < NUMBER_BYTES ? numbers & 15 : numbers >> 4];
            low[i] = r.now[NUMBER_BYTES + place + i];
        }
        row[r.step] = low[0] | high[0] << 8 | low[1] << 16 | high[1] << 24;
        r.apart += is_apart;
        r.high += is_apart ? STEP_WEIGHTS : 0;
    }
}

/* Set rows[i] to the weight's row ids[i]; `rows` [count, steps] of 32 bits, contiguous. Returns the number of ids that are not between 0 and
 * `columns` - 1; their rows are not written. */
int64_t quire_unpack_rows(const char *packed, const struct weight_code *code, int64_t in_strips, int64_t steps, int64_t columns, const int64_t *ids, int64_t count,
                          uint32_t *rows) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= columns) {
            outside++;
            continue;
        }
        if (code) {
            decode_column(read_panel(code, packed, steps, ids[i] / PANEL_COLUMNS), steps, ids[i] % PANEL_COLUMNS, rows + i * steps);
            continue;
        }
        struct place at = linear_place(in_strips, steps, ids[i] % PANEL_COLUMNS);
        const uint32_t *from = (const uint32_t *)packed + ids[i] / PANEL_COLUMNS * steps * PANEL_COLUMNS + at.begin;
        for (int64_t step = 0; step < steps; step++) rows[i * steps + step] = from[step * at.step];
    }
    return outside;
}

/* Size of the L1 data cache; 0 if the system does not report it. */
static int64_t first_level_bytes(void) {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    static int64_t bytes = -1; /* several threads may set it at the same time, to the same value */
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
    /* The sums of groups are scaled in vector registers. */
    if (isa == AMX_BF16 && call->dtype == BFLOAT16 && !call->groups) {
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

/* Compute the GEMM. `parallel` is the address of GOMP_parallel; NULL: run on the calling thread alone. */
void quire_linear(struct linear_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct job job;
    quire_linear_job(&job, call, isa, num_threads);
    job_run(&job, parallel);
}
