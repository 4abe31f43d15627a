/* y = x W^T (+ b) (+ residual) for packed weights; included once per instruction set.
 *
 *     W [columns, depth]  ->  panels of 64 columns, each [steps][64 columns], a step 32 bits of depth:
 *
 *     panel 0   | step 0: w[0] w[1] .. w[63] | step 1: .. | ...     read front to back, once for every 128 rows
 *     panel 1   | ...
 *
 * A unit of work is a panel and up to 128 rows; all panels come before the next rows, whose x then lies in the
 * second-level cache. 128 steps of the panel (32 KiB) at a time serve all of its rows, a
 * register tile of BLOCK_ROWS rows x MAX_VECTORS vectors of columns after the other; while they compute, the
 * next 32 KiB are prefetched, a share by each tile. So with few rows the product runs at the speed of the
 * memory, with many at that of the multipliers.
 *
 * Weights in int8 are widened to pairs of bfloat16, which hold them exactly, 32 KiB at a time; the sums are multiplied
 * by their columns' scales at the end.
 *
 * One element of y is a sum in one lane: the steps of a chunk in order, then the chunks in order, times the scale, then the bias, then the residual.
 * Which rows, columns or threads compute beside it changes nothing: a row's bits are a function of that row alone.
 * In float32 they are the same on every instruction set with a fused multiply-add.
 *
 * The includer defines FN, LINEAR_WORKER (the function's name), DOT_BF16, BLOCK_ROWS (2, 4 or 6) and MAX_VECTORS
 * (1, 2 or 4), and has included its simd_*.h.
 */
#include "row_part.h"

enum { PANEL_VECTORS = PANEL_COLUMNS / LANES, LINES_PER_STEP = PANEL_COLUMNS * 4 / 64 };

struct product {
    const struct linear_call *call;
    const float *weight;      /* the panel's chunk, 32 bits a step and column */
    const char *ahead;        /* the chunk after it as it is stored; NULL: none */
    const char *x;            /* of the chunk's first step */
    float *total;             /* [rows][PANEL_COLUMNS] */
    int64_t ahead_lines;      /* of 64 bytes in it */
    int64_t steps;            /* of the chunk */
    int is_first, is_last;    /* whether total is undefined, whether the sums are complete after it */
    int64_t row, column;      /* the unit's first */
};

/* sum[r][v] += one step of `rows` rows and `vectors` vectors of columns. */
FN void multiply_step(v16 sum[BLOCK_ROWS][MAX_VECTORS], const float *weight, const char *const x[BLOCK_ROWS],
                      int64_t step, int rows, int vectors, int dtype) {
    v16 w[MAX_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) w[v] = v_load(weight + step * PANEL_COLUMNS + v * LANES);
#if DOT_BF16
    (void)dtype;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)x[r])[step]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w[v], pair);
    }
#else
    if (dtype == FLOAT32) {
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            v16 element = v_set1(((const float *)x[r])[step]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] = v_fma(element, w[v], sum[r][v]);
        }
        return;
    }
    v16 high[MAX_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        high[v] = v_bfloat_high(w[v]);
        w[v] = v_bfloat_low(w[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        v16 pair = v_set1(((const float *)x[r])[step]);
        v16 second = v_bfloat_high(pair), first = v_bfloat_low(pair);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = v_fma(first, w[v], sum[r][v]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = v_fma(second, high[v], sum[r][v]);
    }
#endif
}

/* One register tile over a chunk. `ahead` .. `ahead_end` is its share of what is prefetched: few lines with the first
 * steps, many spread over all of them, because after a burst the memory would rest. */
FN void multiply_tile(const struct product *p, int64_t row, int vector, int rows, int vectors, int dtype,
                      const char *ahead, const char *ahead_end) {
    v16 sum[BLOCK_ROWS][MAX_VECTORS];
    const char *x[BLOCK_ROWS];
    const float *weight = p->weight + vector * LANES;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        x[r] = p->x + (row + r) * p->call->x_stride;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = v_set1(0.0f);
    }
    int64_t lines = (ahead_end - ahead) / 64, step = 0, due = 0;
    if (lines <= p->steps) {
        for (; step < lines; step++, ahead += 64) {
            __builtin_prefetch(ahead, 0, 3);
            multiply_step(sum, weight, x, step, rows, vectors, dtype);
        }
        for (; step < p->steps; step++) multiply_step(sum, weight, x, step, rows, vectors, dtype);
    } else {
        for (; step < p->steps; step++) {
            for (due += lines; due >= p->steps; due -= p->steps, ahead += 64) __builtin_prefetch(ahead, 0, 3);
            multiply_step(sum, weight, x, step, rows, vectors, dtype);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *total = p->total + (row + r) * PANEL_COLUMNS + (vector + v) * LANES;
            v_store(total, p->is_first ? sum[r][v] : v_add(v_load(total), sum[r][v]));
        }
    }
}

/* Scale, add the bias and the residual, round, store: rows of the unit whose sums are complete. */
FN void store_rows(const struct product *p, int64_t row, int64_t rows, int dtype) {
    const struct linear_call *c = p->call;
    int64_t end = p->column + PANEL_COLUMNS < c->columns ? p->column + PANEL_COLUMNS : c->columns;
    for (int64_t r = row; r < row + rows; r++) {
        const float *total = p->total + r * PANEL_COLUMNS - p->column;
        for (int64_t i = p->column; i < end; i += LANES) {
            v16 y = v_load(total + i);
            if (c->scales) y = v_mul(y, v_load(c->scales + i));
            if (c->bias) y = v_add(y, v_load(c->bias + i));
            if (c->residual) y = v_add(y, load_part(c->residual + (p->row + r) * c->residual_stride, i, end, dtype));
            store_part(c->out + (p->row + r) * c->out_stride, i, end, dtype, y);
        }
    }
}

/* Ask for what `store_rows` will read and write. Other threads have written it last: where each line was fetched by the access
 * itself, a prefill waited for 5% of its cycles. */
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

/* All rows of a unit over a chunk, in tiles of nearly equal height. */
FN void multiply_chunk(const struct product *p, int64_t rows, int dtype) {
    int64_t tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, row = 0;
    int64_t passes = tiles * (PANEL_VECTORS / MAX_VECTORS), pass = 0;
    int64_t lines = p->ahead ? p->ahead_lines : 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t height = (rows - row + tiles - tile - 1) / (tiles - tile);
        if (p->is_last) ask_for_rows(p, row, height, dtype);
        for (int vector = 0; vector < PANEL_VECTORS; vector += MAX_VECTORS, pass++) {
            const char *ahead = p->ahead + lines * pass / passes * 64;
            const char *end = p->ahead + lines * (pass + 1) / passes * 64;
#define TILE_OF(count) \
    case count: \
        multiply_tile(p, row, vector, count, MAX_VECTORS, dtype, ahead, end); \
        break;
            switch (height) {
                TILE_OF(1)
                TILE_OF(2)
#if BLOCK_ROWS > 2
                TILE_OF(3)
                TILE_OF(4)
#endif
#if BLOCK_ROWS > 4
                TILE_OF(5)
                TILE_OF(6)
#endif
            }
#undef TILE_OF
        }
        if (p->is_last) store_rows(p, row, height, dtype);
        row += height;
    }
}

/* `steps` steps of pairs from half as many of int8, each as many columns. */
FN void widen_chunk(uint32_t *pairs, const uint32_t *bytes, int64_t steps) {
    for (int64_t step = 0; step < steps; step += 2, bytes += PANEL_COLUMNS) {
        for (int v = 0; v < PANEL_COLUMNS; v += LANES) {
            v16 four = v_load((const float *)(bytes + v));
            v_store((float *)(pairs + step * PANEL_COLUMNS + v), v_byte_pair(four, 0));
            v_store((float *)(pairs + (step + 1) * PANEL_COLUMNS + v), v_byte_pair(four, 2));
        }
    }
}

FN void multiply_unit(const struct linear_call *c, int64_t unit, int64_t next, int64_t panels, float *total, uint32_t *pairs, int dtype) {
    int64_t panel = unit % panels, row = unit / panels * MAX_UNIT_ROWS;
    int64_t rows = c->rows - row < MAX_UNIT_ROWS ? c->rows - row : MAX_UNIT_ROWS;
    int64_t steps_per_word = c->scales ? 2 : 1, panel_words = c->steps / steps_per_word * PANEL_COLUMNS;
    const uint32_t *weight = c->weight + panel * panel_words;
    for (int64_t first = 0; first < c->steps; first += CHUNK) {
        int64_t steps = c->steps - first < CHUNK ? c->steps - first : CHUNK;
        const uint32_t *chunk = weight + first / steps_per_word * PANEL_COLUMNS, *ahead = NULL;
        if (first + CHUNK < c->steps) {
            ahead = chunk + CHUNK / steps_per_word * PANEL_COLUMNS;
        } else if (next >= 0) {
            ahead = c->weight + next % panels * panel_words;
        }
        if (c->scales) widen_chunk(pairs, chunk, steps);
        struct product p = {c, (const float *)(c->scales ? pairs : chunk), (const char *)ahead, c->x + row * c->x_stride + first * 4, total,
                            CHUNK / steps_per_word * LINES_PER_STEP, steps, first == 0, first + CHUNK >= c->steps, row, panel * PANEL_COLUMNS};
        multiply_chunk(&p, rows, dtype);
    }
}

/* Take units until none is left; the next is taken before a unit begins, so that its weights can be prefetched. */
TARGETED int64_t LINEAR_WORKER(void *argument) {
    struct linear_call *c = argument;
    int64_t panels = linear_panels(c);
    _Alignas(64) float total[MAX_UNIT_ROWS * PANEL_COLUMNS];
    _Alignas(64) uint32_t pairs[CHUNK * PANEL_COLUMNS];
    struct member member = team_join(c->team);
    int64_t done = 0;
    for (int64_t next, unit = team_take(c->team, &member); unit >= 0; unit = next, done++) {
        next = team_take(c->team, &member);
        if (DOT_BF16 || c->dtype == BFLOAT16) {
            multiply_unit(c, unit, next, panels, total, pairs, BFLOAT16);
        } else {
            multiply_unit(c, unit, next, panels, total, pairs, FLOAT32);
        }
    }
    return done;
}
