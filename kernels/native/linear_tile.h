/* A packed product in vector registers; included once per instruction set.
 *
 * A chunk of a panel serves all rows of a unit, a register tile of BLOCK_ROWS rows x MAX_VECTORS vectors of columns after
 * the other; each prefetches its share of the next chunk.
 *
 * One element of y is a sum in one lane: the steps of a chunk in order, then the chunks in order, times the scale, then the bias, then the residual.
 * Which rows, columns or threads compute beside it changes nothing: a row's bits are a function of that row alone.
 * In float32 they are the same on every instruction set with a fused multiply-add.
 *
 * The includer defines FN, TARGETED, LINEAR_WORKER, DOT_BF16, BLOCK_ROWS (2, 4 or 6) and MAX_VECTORS
 * (1, 2 or 4), AHEAD_LEVEL (of the cache into which a chunk is prefetched: 3 the first, 2 the second) and AHEAD_FROM (tiles of
 * a unit from which on it is), and has included its simd_*.h.
 */
#define ONLY_BF16 DOT_BF16
#define MOST_ROWS MAX_UNIT_ROWS
#define READS_STRIPS 0

struct multiplier {
    char nothing;
};

#include "linear_unit.h"

FN void begin_multiplying(struct multiplier *m) { (void)m; }

FN void end_multiplying(struct multiplier *m) { (void)m; }

FN int64_t chunk_steps(const struct linear_call *c, int64_t rows) {
    (void)c;
    (void)rows;
    return CHUNK;
}

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
            __builtin_prefetch(ahead, 0, AHEAD_LEVEL);
            multiply_step(sum, weight, x, step, rows, vectors, dtype);
        }
        for (; step < p->steps; step++) multiply_step(sum, weight, x, step, rows, vectors, dtype);
    } else {
        for (; step < p->steps; step++) {
            for (due += lines; due >= p->steps; due -= p->steps, ahead += 64) __builtin_prefetch(ahead, 0, AHEAD_LEVEL);
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

/* In tiles of nearly equal height. */
FN void multiply_chunk(struct multiplier *m, const struct product *p, int64_t rows, int dtype) {
    (void)m;
    int64_t tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, row = 0;
    int64_t passes = tiles * (PANEL_VECTORS / MAX_VECTORS), pass = 0;
    int64_t lines = tiles < AHEAD_FROM ? 0 : p->ahead_lines;
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
