/* bfloat16 on processors with matrix registers (Intel's AMX).
 *
 * One instruction multiplies 16 rows x 16 steps with 16 steps x 16 columns. A unit's rows go 16 at a time with all columns of
 * the panel, four registers of sums: x is read once for four products, and the chunk of the panel, which all rows read, stays in
 * the first-level cache, because x is loaded past it. With 32 x 32 sums, or with chunks of the whole depth, the second-level
 * cache was the bound and a product a quarter slower.
 *
 * One element of y is a sum of float32: for 16 steps at a time, in order, the first elements of their pairs and the second
 * ones are added up apart, and then to what was there. So chunks change nothing, and a row's bits are a function of that row
 * alone.
 */
#include "linear.h"

#if HAS_AMX
#define TARGETED __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define LINEAR_WORKER quire_linear_amx
#define ONLY_BF16 1
#define MOST_ROWS MAX_TALL_UNIT_ROWS

#include "simd_avx512.h"

#include "matrix_registers.h"

struct multiplier {
    struct extents extents;
    int rows, steps; /* that they are set for */
};

#include "linear_unit.h"

FN void begin_multiplying(struct multiplier *m) {
    m->extents = no_extents();
    m->rows = m->steps = 0;
}

FN void end_multiplying(struct multiplier *m) {
    (void)m;
    _tile_release();
}

/* Registers 0 to 3 for sums, 4 for x, 5 to 7 for weights. */
FN void set_extents(struct multiplier *m, int rows, int steps) {
    if (m->rows == rows && m->steps == steps) return;
    m->rows = rows;
    m->steps = steps;
    for (int i = 0; i < 4; i++) set_extent(&m->extents, i, rows, LANES);
    set_extent(&m->extents, 4, rows, steps);
    for (int i = 5; i < 8; i++) set_extent(&m->extents, i, steps, LANES);
    _tile_loadconfig(&m->extents);
}

/* Lines to prefetch, an even share with each of `turns` turns. */
struct share {
    const char *next;
    int64_t lines, turns, due;
};

FN void prefetch_share(struct share *s) {
    for (s->due += s->lines; s->due >= s->turns; s->due -= s->turns, s->next += CACHE_LINE) __builtin_prefetch(s->next, 0, 2);
}

/* Up to 16 rows and the panel's columns over `turns` times the steps of a register. What is prefetched goes between the loads,
 * a few lines at a time: in one burst a turn, one row read its weights a seventh slower. */
FN void multiply_rows(const float *weight, const char *x, int64_t x_stride, float *total, int is_first, int64_t turns, struct share ahead) {
    enum { STRIDE = PANEL_COLUMNS * 4 };
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, total, STRIDE);
        _tile_loadd(1, total + LANES, STRIDE);
        _tile_loadd(2, total + 2 * LANES, STRIDE);
        _tile_loadd(3, total + 3 * LANES, STRIDE);
    }
    for (; turns > 0; turns--, weight += REGISTER_ROWS * PANEL_COLUMNS, x += REGISTER_BYTES) {
        prefetch_share(&ahead);
        _tile_stream_loadd(4, x, x_stride);
        _tile_loadd(5, weight, STRIDE);
        prefetch_share(&ahead);
        _tile_loadd(6, weight + LANES, STRIDE);
        prefetch_share(&ahead);
        _tile_loadd(7, weight + 2 * LANES, STRIDE);
        _tile_dpbf16ps(0, 4, 5);
        prefetch_share(&ahead);
        _tile_loadd(5, weight + 3 * LANES, STRIDE);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, total, STRIDE);
    _tile_stored(1, total + LANES, STRIDE);
    _tile_stored(2, total + 2 * LANES, STRIDE);
    _tile_stored(3, total + 3 * LANES, STRIDE);
}

/* The chunk's steps from `first` on, `turns` times as many as a register is set for. */
FN void multiply_steps(struct multiplier *m, const struct product *p, int64_t rows, int64_t first, int64_t turns, int steps, int64_t lines) {
    const int is_first = p->is_first && !first, is_last = p->is_last && first + turns * steps == p->steps;
    const float *weight = p->weight + first * PANEL_COLUMNS;
    for (int64_t row = 0, end; row < rows; row = end) {
        end = row + REGISTER_ROWS < rows ? row + REGISTER_ROWS : rows;
        int64_t begin_line = lines * row / rows, end_line = lines * end / rows;
        struct share ahead = {p->ahead + begin_line * CACHE_LINE, end_line - begin_line, turns * 4, 0};
        float *total = p->total + row * PANEL_COLUMNS;
        set_extents(m, (int)(end - row), steps);
        if (is_last) ask_for_rows(p, row, end - row, BFLOAT16);
        multiply_rows(weight, p->x + row * p->call->x_stride + first * 4, p->call->x_stride, total, is_first, turns, ahead);
        if (is_last) store_rows(p, row, end - row, BFLOAT16);
    }
}

FN void multiply_chunk(struct multiplier *m, const struct product *p, int64_t rows, int dtype) {
    (void)dtype;
    int64_t turns = p->steps / REGISTER_ROWS, rest = p->steps % REGISTER_ROWS;
    if (turns) multiply_steps(m, p, rows, 0, turns, REGISTER_ROWS, p->ahead_lines);
    if (rest) multiply_steps(m, p, rows, p->steps - rest, 1, (int)rest, turns ? 0 : p->ahead_lines);
}
#endif
