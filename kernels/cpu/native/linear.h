/* Declarations that the sources of the packed GEMM share: the arguments of a call and the layout of the weights.
 *
 * `struct linear_call` is mirrored field by field in `quire/kernels/cpu/cpu_linear.py`. A change of the structure must raise QUIRE_ABI in
 * attention.h and ABI in native_library.py.
 */
#ifndef QUIRE_LINEAR_H
#define QUIRE_LINEAR_H

#include <stdint.h>
#include <string.h>

#include "attention.h" /* enum dtype, LANES */
#include "linear_code.h"
#include "linear_groups.h"
#include "team.h"

enum {
    PANEL_COLUMNS = 64, /* columns of the output whose weights are contiguous */
    CHUNK = 128,        /* steps that are summed separately and then added to the total: 32 KiB of weights */
    MAX_UNIT_ROWS = 128,
    MAX_TALL_UNIT_ROWS = 256, /* with matrix registers, which finish 128 rows before the next chunk has arrived */
    TALL_UNIT_STEPS = 512,    /* largest depth for units of 256 rows, 512 KiB of x: more would leave the L2 cache before the next panel */
};

struct linear_call {
    const char *x;          /* [rows, depth], rows contiguous */
    int64_t x_stride;       /* bytes between rows */
    char *out;              /* [rows, columns], rows contiguous, dtype of x */
    int64_t out_stride;     /* bytes between rows */
    const char *weight;     /* [panels, steps, PANEL_COLUMNS] of 32 bits; for int8 [panels, steps / 2, PANEL_COLUMNS] */
    const struct weight_code *code; /* for coded bfloat16, where panels are [steps, CODED_STEP_BYTES]; or NULL */
    const struct weight_groups *groups; /* for weights of 4 bits, where panels are [steps, NUMBER_BYTES]; or NULL */
    int64_t in_strips;      /* whether a panel is [strips, steps, LANES] instead; only for weights in the dtype of x */
    const float *scales;    /* [panels][groups][PANEL_COLUMNS] for int8 weights; NULL: weights in the dtype of x */
    int64_t scale_steps;    /* steps of a group of int8 weights, even */
    const float *bias;      /* [panels * PANEL_COLUMNS] or NULL */
    const char *residual;   /* [rows, columns], rows contiguous, dtype of x; may be `out`; or NULL */
    int64_t residual_stride; /* bytes between rows */
    int64_t rows, steps, columns, dtype;
    int64_t unit_rows;      /* most rows of a unit; set by the library */
    int64_t holds_two_chunks; /* whether the L1 cache holds the next chunk in addition to the current one; set by the library */
    struct team *team;      /* distributes the units, panels times blocks of rows; set by the library */
};

static inline int64_t linear_row_blocks(const struct linear_call *c) { return (c->rows + c->unit_rows - 1) / c->unit_rows; }

static inline int64_t linear_panels(const struct linear_call *c) { return (c->columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

/* Stored bytes of `steps` steps of a panel. */
static inline int64_t linear_panel_bytes(const struct linear_call *c, int64_t steps) {
    if (c->groups) return steps * NUMBER_BYTES;
    return c->code ? steps * CODED_STEP_BYTES : steps / (c->scales ? 2 : 1) * PANEL_COLUMNS * 4;
}

/* Index of a column's first step in a panel of `steps` steps, and the distance between its steps. */
struct place {
    int64_t begin, step;
};

static inline struct place linear_place(int64_t in_strips, int64_t steps, int64_t column) {
    if (in_strips) return (struct place){column / LANES * steps * LANES + column % LANES, LANES};
    return (struct place){column, PANEL_COLUMNS};
}

/* Write columns `begin` to `end` - 1 of a panel from the same number of rows, in squares that stay in the L1 cache. */
static inline void linear_pack_panel(uint32_t *panel, int64_t in_strips, int64_t steps, const char *rows, int64_t row_stride, int64_t begin, int64_t end) {
    enum { BLOCK_STEPS = 16 }; /* a cache line of a source row */
    for (int64_t step = 0; step < steps; step += BLOCK_STEPS) {
        int64_t count = steps - step < BLOCK_STEPS ? steps - step : BLOCK_STEPS;
        for (int64_t column = begin; column < end; column++) {
            uint32_t line[BLOCK_STEPS];
            memcpy(line, rows + (column - begin) * row_stride + step * 4, (size_t)count * 4);
            struct place at = linear_place(in_strips, steps, column);
            for (int64_t s = 0; s < count; s++) panel[at.begin + (step + s) * at.step] = line[s];
        }
    }
}

/* A step of the sum over depth is 32 bits: one float32 or a pair of bfloat16. int8 weights have two steps in 32 bits and are converted to
 * pairs of bfloat16, one chunk at a time. */

/* Set the counters of a call and choose the worker for `isa`. */
void quire_linear_job(struct job *job, struct linear_call *call, int64_t isa, int64_t num_threads);

int64_t quire_linear_generic(void *call);
#if defined(__x86_64__)
int64_t quire_linear_avx2(void *call);
int64_t quire_linear_avx512(void *call);
int64_t quire_linear_avx512_bf16(void *call);
#endif
#if HAS_AMX
int64_t quire_linear_amx(void *call);
#endif

#endif
