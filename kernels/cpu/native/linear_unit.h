/* Units of work of a packed GEMM. Included once for each instruction set, before the functions that multiply.
 *
 *     W [columns, depth]  ->  panels of 64 columns, each [steps][64 columns]; a step is 32 bits of depth:
 *
 *     panel 0   | step 0: w[0] w[1] .. w[63] | step 1: .. | ...     read front to back, once for each unit_rows rows
 *     panel 1   | ...
 *
 *     in strips, for matrix registers:  panel 0   | step 0: w[0] .. w[15] | step 1: .. | ... | step 0: w[16] .. w[31] | ...
 *
 * A unit is a panel and up to unit_rows rows. All panels are processed for the same rows before the next rows, so that x stays in the
 * L2 cache. A chunk of 128 steps of the panel (32 KiB, 24 KiB of coded weights) is used for all rows of the unit, while the next
 * chunk is prefetched. So the GEMM is limited by the memory with few rows, and by the multipliers with many rows.
 *
 * Coded weights (linear_code.h) give the same bits as uncoded ones. They are decoded one chunk at a time, for few rows in registers.
 *
 * Weights of 4 bits (linear_groups.h) are decoded like coded ones. A chunk is one group, or 128 steps of the only group; its sums are multiplied
 * by the group's scales before they are added to the total.
 *
 * int8 weights have a scale for each column and group of steps. They are scaled and rounded to pairs of bfloat16, 32 KiB at a time, so they give
 * the same bits as bfloat16 weights of these values.
 *
 * The including file includes its simd_*.h before and defines: FN, TARGETED (function attributes); LINEAR_WORKER (name of the function);
 * MOST_ROWS of a unit; ONLY_BF16, whether only bfloat16 is supported, with the processor's instructions for it; READS_STRIPS, whether weights
 * in strips are multiplied without conversion; `struct multiplier`, the state of a thread between chunks. After this file it defines the four
 * functions declared here.
 */
#include "row_part.h"

enum { PANEL_VECTORS = PANEL_COLUMNS / LANES };

struct product {
    const struct linear_call *call;
    const float *weight;      /* the panel's chunk, 32 bits for each step and column */
    int64_t step, strip;      /* distance between a column's steps, and between vectors of columns */
    struct reader *reader;    /* of a coded chunk that is not decoded to `pairs` yet, to which `weight` points; or NULL */
    const float *group_scales; /* [PANEL_COLUMNS] of the chunk, for weights of 4 bits; or NULL */
    float *pairs;             /* [steps][PANEL_COLUMNS] */
    const char *ahead;        /* the next chunk as it is stored, or its first strip */
    const char *x;            /* x at the chunk's first step */
    int64_t x_stride;         /* bytes between rows of x */
    float *total;             /* [rows][PANEL_COLUMNS] */
    int64_t ahead_lines;      /* lines of 64 bytes in `ahead`; 0: there is no next chunk */
    int64_t steps;            /* steps of the chunk */
    int is_first, is_last;    /* whether `total` is undefined before the chunk; whether the sums are complete after it */
    int64_t row, column;      /* first row and column of the unit */
};

FN void begin_multiplying(struct multiplier *m);

/* Steps of a chunk: CHUNK, or all steps if a chunk need not stay in the L1 cache. */
FN int64_t chunk_steps(const struct linear_call *c, int64_t rows);

/* Multiply all rows of a unit with a chunk: add the sums to p->total, and call `store_rows` after the last chunk. */
FN void multiply_chunk(struct multiplier *m, const struct product *p, int64_t rows, int dtype);

FN void end_multiplying(struct multiplier *m);

/* Finish rows of the unit whose sums are complete: add the bias and the residual, round, store. */
FN void store_rows(const struct product *p, int64_t row, int64_t rows, int dtype) {
    const struct linear_call *c = p->call;
    int64_t end = p->column + PANEL_COLUMNS < c->columns ? p->column + PANEL_COLUMNS : c->columns;
    for (int64_t r = row; r < row + rows; r++) {
        const float *total = p->total + r * PANEL_COLUMNS - p->column;
        int64_t i = p->column;
#if ONLY_BF16
        for (; i + 2 * LANES <= end; i += 2 * LANES) {
            v16 y[2] = {v_load(total + i), v_load(total + i + LANES)};
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                int64_t column = i + j * LANES;
                if (c->bias) y[j] = v_add(y[j], v_load(c->bias + column));
                if (c->residual) y[j] = v_add(y[j], v_load_elements(c->residual + (p->row + r) * c->residual_stride + column * 2, BFLOAT16, LANES));
            }
            _mm512_storeu_si512(c->out + (p->row + r) * c->out_stride + i * 2, (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
        }
#endif
        for (; i < end; i += LANES) {
            v16 y = v_load(total + i);
            if (c->bias) y = v_add(y, v_load(c->bias + i));
            if (c->residual) y = v_add(y, load_part(c->residual + (p->row + r) * c->residual_stride, i, end, dtype));
            store_part(c->out + (p->row + r) * c->out_stride, i, end, dtype, y);
        }
    }
}

/* Prefetch the lines that `store_rows` will read and write. Other threads wrote them last: without the prefetches a prefill waited for 5% of its
 * cycles. */
FN void ask_for_rows(const struct product *p, int64_t row, int64_t rows, int dtype) {
    const struct linear_call *c = p->call;
    int64_t bytes = dtype == FLOAT32 ? 4 : 2, begin = p->column * bytes, end = begin + PANEL_COLUMNS * bytes;
    for (int64_t r = p->row + row; r < p->row + row + rows; r++) {
        for (int64_t i = begin; i < end; i += CACHE_LINE) {
            __builtin_prefetch(c->out + r * c->out_stride + i, 1, 3);
            if (c->residual) __builtin_prefetch(c->residual + r * c->residual_stride + i, 0, 3);
        }
    }
}

/* Convert the int8 weights of a panel's steps `first` to `end` - 1 to pairs; `bytes` is that of the first step. */
FN void widen_chunk(float *pairs, const float *bytes, const struct linear_call *c, int64_t panel, int64_t first, int64_t end) {
    const int64_t groups = (c->steps + c->scale_steps - 1) / c->scale_steps;
    for (int64_t step = first; step < end;) {
        const int64_t group = step / c->scale_steps, next = (group + 1) * c->scale_steps, until = next < end ? next : end;
        v16 scales[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            scales[v] = v_mul(v_load(c->scales + (panel * groups + group) * PANEL_COLUMNS + v * LANES), v_set1(0x1p-24f));
        for (; step < until; step += 2, bytes += PANEL_COLUMNS, pairs += 2 * PANEL_COLUMNS) {
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const v16 four = v_load(bytes + v * LANES);
                v_store(pairs + v * LANES, v_byte_pair(four, 0, scales[v]));
                v_store(pairs + PANEL_COLUMNS + v * LANES, v_byte_pair(four, 2, scales[v]));
            }
        }
    }
}

/* Convert `steps` steps in strips to the layout without strips. */
FN void join_strips(uint32_t *pairs, const uint32_t *strips, int64_t strip, int64_t steps) {
    for (int64_t step = 0; step < steps; step++)
        for (int v = 0; v < PANEL_VECTORS; v++)
            v_store((float *)(pairs + step * PANEL_COLUMNS + v * LANES), v_load((const float *)(strips + v * strip + step * LANES)));
}

/* Low and high bytes of the bfloat16 numbers 0 to 15. */
static const uint8_t WHOLE_LOW[TABLE_BYTES] = {0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0, 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
static const uint8_t WHOLE_HIGH[TABLE_BYTES] = {0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};

/* Decode the next step of a panel of 4-bit weights: number - zero, without the scale. */
FN void read_numbers(v16 pairs[PANEL_VECTORS], struct reader *r) {
    const v_bytes low_table = v_repeat_bytes(WHOLE_LOW), high_table = v_repeat_bytes(WHOLE_HIGH), both = v_load_bytes(r->now);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const v_bytes number = i ? v_upper_halves(both) : v_lower_halves(both);
        const v_bytes difference = v_sub_bytes(number, v_load_bytes((const uint8_t *)r->zeros + i * (STEP_WEIGHTS / 2)));
        const v_bytes size = v_abs_bytes(difference);
        const v_bytes low = v_look_up(low_table, size), high = v_with_sign(v_look_up(high_table, size), difference);
        pairs[2 * i] = v_interleave_first(low, high);
        pairs[2 * i + 1] = v_interleave_last(low, high);
    }
    r->now += NUMBER_BYTES;
    r->step++;
}

/* Decode the next step of a coded panel. */
FN void read_step(v16 pairs[PANEL_VECTORS], struct reader *r) {
    if (r->zeros) {
        read_numbers(pairs, r);
        return;
    }
    v_bytes high[2];
    if (__builtin_expect(r->step == *r->apart, 0)) { /* the hint makes 12 to 24 rows 1 to 2% faster (Zen 4) */
        high[0] = v_load_bytes(r->high);
        high[1] = v_load_bytes(r->high + STEP_WEIGHTS / 2);
        r->high += STEP_WEIGHTS;
        r->apart++;
    } else {
        const v_bytes table = v_repeat_bytes(r->table), numbers = v_load_bytes(r->now);
        high[0] = v_look_up(table, v_lower_halves(numbers));
        high[1] = v_look_up(table, v_upper_halves(numbers));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const v_bytes low = v_load_bytes(r->now + NUMBER_BYTES + i * (STEP_WEIGHTS / 2));
        pairs[2 * i] = v_interleave_first(low, high[i]);
        pairs[2 * i + 1] = v_interleave_last(low, high[i]);
    }
    r->now += CODED_STEP_BYTES;
    r->step++;
}

FN void store_step(float *pairs, const v16 decoded[PANEL_VECTORS]) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) v_store(pairs + v * LANES, decoded[v]);
}

/* Decode `steps` steps of a coded panel to pairs. */
FN void decode_chunk(float *pairs, struct reader *reader, int64_t steps) {
    struct reader r = *reader;
    for (int64_t step = 0; step < steps; step++, pairs += PANEL_COLUMNS) {
        v16 read[PANEL_VECTORS];
        read_step(read, &r);
        store_step(pairs, read);
    }
    *reader = r;
}

FN void multiply_unit(struct multiplier *m, const struct linear_call *c, int64_t unit, int64_t next, int64_t panels, float *total, uint32_t *pairs, int dtype) {
    int64_t panel = unit % panels, row = unit / panels * c->unit_rows;
    int64_t rows = c->rows - row < c->unit_rows ? c->rows - row : c->unit_rows, chunk = chunk_steps(c, rows);
    int64_t panel_bytes = linear_panel_bytes(c, c->steps), strip = c->in_strips ? c->steps * LANES : LANES;
    const char *weight = c->weight + panel * panel_bytes;
    const int is_stored = !c->scales && !c->code && !c->groups && (READS_STRIPS || !c->in_strips); /* whether weights are multiplied as stored */
    struct reader reader = {0};
    if (c->code) reader = read_panel(c->code, c->weight, c->steps, panel);
    const int64_t groups = c->groups ? (c->steps + c->groups->group_steps - 1) / c->groups->group_steps : 0;
    if (c->groups) reader.now = (const uint8_t *)weight;
    for (int64_t first = 0; first < c->steps; first += chunk) {
        int64_t steps = c->steps - first < chunk ? c->steps - first : chunk;
        int64_t chunk_bytes = c->in_strips ? chunk * LANES * 4 : linear_panel_bytes(c, chunk);
        const char *now = weight + first / chunk * chunk_bytes, *ahead = NULL;
        if (first + chunk < c->steps) {
            ahead = now + chunk_bytes;
        } else if (next >= 0) {
            ahead = c->weight + next % panels * panel_bytes;
        }
        const int64_t group = c->groups ? panel * groups + first / c->groups->group_steps : 0;
        if (c->groups) reader.zeros = c->groups->zeros + group * STEP_WEIGHTS;
        if (c->scales) widen_chunk((float *)pairs, (const float *)now, c, panel, first, first + steps);
        if (!READS_STRIPS && c->in_strips) join_strips(pairs, (const uint32_t *)now, strip, steps);
        struct product p = {.call = c,
                            .weight = is_stored ? (const float *)now : (const float *)pairs,
                            .step = is_stored && c->in_strips ? LANES : PANEL_COLUMNS,
                            .strip = is_stored ? strip : LANES,
                            .reader = c->code || c->groups ? &reader : NULL,
                            .group_scales = c->groups ? c->groups->scales + group * PANEL_COLUMNS : NULL,
                            .pairs = (float *)pairs,
                            .ahead = ahead,
                            .x = c->x + row * c->x_stride + first * 4,
                            .x_stride = c->x_stride,
                            .total = total,
                            .ahead_lines = ahead && (READS_STRIPS || !c->in_strips) ? linear_panel_bytes(c, chunk) / CACHE_LINE : 0,
                            .steps = steps,
                            .is_first = first == 0,
                            .is_last = first + chunk >= c->steps,
                            .row = row,
                            .column = panel * PANEL_COLUMNS};
        multiply_chunk(m, &p, rows, dtype);
    }
}

/* Process units until none is left. The next unit is taken before the current one begins, so that its weights can be prefetched. */
TARGETED int64_t LINEAR_WORKER(void *argument) {
    struct linear_call *c = argument;
    int64_t panels = linear_panels(c);
    _Alignas(64) float total[MOST_ROWS * PANEL_COLUMNS];
    _Alignas(64) uint32_t pairs[CHUNK * PANEL_COLUMNS];
    struct multiplier m;
    struct member member = team_join(c->team);
    begin_multiplying(&m);
    int64_t done = 0;
    for (int64_t next, unit = team_take(c->team, &member); unit >= 0; unit = next, done++) {
        next = team_take(c->team, &member);
        if (ONLY_BF16 || c->dtype == BFLOAT16) {
            multiply_unit(&m, c, unit, next, panels, total, pairs, BFLOAT16);
        } else {
            multiply_unit(&m, c, unit, next, panels, total, pairs, FLOAT32);
        }
    }
    end_multiplying(&m);
    return done;
}
