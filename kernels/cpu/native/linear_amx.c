/* bfloat16 on processors with matrix registers (Intel's AMX).
 *
 * One instruction multiplies 16 rows x 16 steps with 16 steps x 16 columns. A unit's rows go 16 at a time with all columns of
 * the panel, four registers of sums: x is read once for four products, and the chunk of the panel, which all rows read, stays in
 * the first-level cache, because x is loaded past it. With 32 x 32 sums, or with chunks of the whole depth, the second-level
 * cache was the bound and a product a quarter slower.
 *
 * Up to 32 rows it is the memory that is the bound: they read a panel once, over its whole depth, 16 rows four strips side by
 * side, more of them two strips and then the other two.
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
#define READS_STRIPS 1

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

/* Up to 16 rows: registers 0 to 3 for sums, 4 for x, 5 to 7 for weights; up to 32: 1 and 3 for sums of the rows from the 17th on,
 * 5 for x of these, 6 and 7 for weights. */
FN void set_extents(struct multiplier *m, int rows, int steps) {
    if (m->rows == rows && m->steps == steps) return;
    m->rows = rows;
    m->steps = steps;
    const int is_tall = rows > REGISTER_ROWS, upper = is_tall ? REGISTER_ROWS : rows, lower = is_tall ? rows - REGISTER_ROWS : rows;
    for (int i = 0; i < 4; i++) set_extent(&m->extents, i, i % 2 ? lower : upper, LANES);
    set_extent(&m->extents, 4, upper, steps);
    for (int i = 5; i < 8; i++) set_extent(&m->extents, i, steps, LANES);
    if (is_tall) set_extent(&m->extents, 5, lower, steps);
    _tile_loadconfig(&m->extents);
}

/* Which rows read the whole depth of a panel at once: the weights come from memory and serve all rows when they are there. More rows
 * read each chunk again, from the first-level cache. */
enum { DEEP_ROWS = 2 * REGISTER_ROWS };

FN int64_t chunk_steps(const struct linear_call *c, int64_t rows) { return c->in_strips && rows <= DEEP_ROWS ? c->steps : CHUNK; }

/* Lines of a chunk to prefetch, an even share with each of `turns` turns. Those of strips in turns: strips are read side by side. */
struct share {
    const char *chunk;
    int64_t strip_bytes; /* 0: the lines follow each other */
    int64_t line, lines, turns, due;
};

FN void prefetch_share(struct share *s) {
    for (s->due += s->lines; s->due >= s->turns; s->due -= s->turns, s->line++) {
        int64_t offset = s->strip_bytes ? s->line % PANEL_VECTORS * s->strip_bytes + s->line / PANEL_VECTORS * CACHE_LINE : s->line * CACHE_LINE;
        __builtin_prefetch(s->chunk + offset, 0, 2);
    }
}

/* What a turn will read of a strip after the next 512 bytes, to the first-level cache; `after` is where the strip goes on after this turn. Four
 * strips at once, so close ahead, keep the memory a fifth busier than one run of lines a chunk ahead did: the processor's own
 * prefetchers take them up. */
FN void prefetch_strip(const char *strip, const char *after) {
    enum { TURN_LINES = REGISTER_ROWS * LANES * 4 / CACHE_LINE, NEAR_LINES = TURN_LINES / 2 };
#pragma GCC unroll 8
    for (int i = NEAR_LINES; i < TURN_LINES; i++) __builtin_prefetch(strip + i * CACHE_LINE, 0, 3);
#pragma GCC unroll 8
    for (int i = 0; i < NEAR_LINES; i++) __builtin_prefetch(after + i * CACHE_LINE, 0, 3);
}

/* Some steps of a chunk for some rows of a unit. */
struct block {
    const float *weight;
    int64_t step_bytes, strip; /* of the weights */
    const char *x;
    int64_t x_stride;          /* bytes */
    float *total;
    int is_first;              /* whether total is undefined */
    int64_t turns;             /* times the steps of a register */
    const float *after;        /* where the weights go on after the last turn */
};

enum { TOTAL_BYTES = PANEL_COLUMNS * 4 }; /* between rows of the sums */

/* The four registers of sums: from what they were, or zeros. */
FN void load_sums(int is_first, const float *a, const float *b, const float *c, const float *d) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, a, TOTAL_BYTES);
        _tile_loadd(1, b, TOTAL_BYTES);
        _tile_loadd(2, c, TOTAL_BYTES);
        _tile_loadd(3, d, TOTAL_BYTES);
    }
}

FN void store_sums(float *a, float *b, float *c, float *d) {
    _tile_stored(0, a, TOTAL_BYTES);
    _tile_stored(1, b, TOTAL_BYTES);
    _tile_stored(2, c, TOTAL_BYTES);
    _tile_stored(3, d, TOTAL_BYTES);
}

/* Up to 16 rows and the panel's columns. What is prefetched goes between the loads, a few lines at a time: in one burst a turn, one
 * row read its weights a seventh slower. With a `share` it is that, else what comes next in the strips. */
FN void multiply_rows(const struct block *b, struct share *share) {
    const float *weight = b->weight;
    const char *x = b->x;
    const int64_t step_bytes = b->step_bytes, strip = b->strip;
    load_sums(b->is_first, b->total, b->total + LANES, b->total + 2 * LANES, b->total + 3 * LANES);
    for (int64_t turn = b->turns; turn > 0; turn--, weight += REGISTER_ROWS * step_bytes / 4, x += REGISTER_BYTES) {
        const float *after = turn > 1 ? weight + REGISTER_ROWS * LANES : b->after;
#define READ_AHEAD(number) \
    if (share) { \
        prefetch_share(share); \
    } else { \
        prefetch_strip((const char *)(weight + number * strip), (const char *)(after + number * strip)); \
    }
        READ_AHEAD(0)
        _tile_stream_loadd(4, x, b->x_stride);
        _tile_loadd(5, weight, step_bytes);
        READ_AHEAD(1)
        _tile_loadd(6, weight + strip, step_bytes);
        READ_AHEAD(2)
        _tile_loadd(7, weight + 2 * strip, step_bytes);
        _tile_dpbf16ps(0, 4, 5);
        READ_AHEAD(3)
        _tile_loadd(5, weight + 3 * strip, step_bytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
    store_sums(b->total, b->total + LANES, b->total + 2 * LANES, b->total + 3 * LANES);
}

/* 17 to 32 rows and two strips. */
FN void multiply_pair(const struct block *b) {
    const float *weight = b->weight;
    const char *x = b->x, *lower_x = x + REGISTER_ROWS * b->x_stride;
    float *total = b->total, *lower_total = total + REGISTER_ROWS * PANEL_COLUMNS;
    load_sums(b->is_first, total, lower_total, total + LANES, lower_total + LANES);
    for (int64_t turn = b->turns; turn > 0; turn--, weight += REGISTER_ROWS * LANES, x += REGISTER_BYTES, lower_x += REGISTER_BYTES) {
        const float *after = turn > 1 ? weight + REGISTER_ROWS * LANES : b->after;
        prefetch_strip((const char *)weight, (const char *)after);
        _tile_loadd(4, x, b->x_stride);
        _tile_loadd(5, lower_x, b->x_stride);
        _tile_loadd(6, weight, b->step_bytes);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_strip((const char *)(weight + b->strip), (const char *)(after + b->strip));
        _tile_loadd(7, weight + b->strip, b->step_bytes);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(total, lower_total, total + LANES, lower_total + LANES);
}

/* The block of a chunk that begins at a row and a step. */
FN struct block block_at(const struct product *p, int64_t row, int64_t first, int64_t turns) {
    const float *weight = p->weight + first * p->step;
    return (struct block){
        .weight = weight,
        .step_bytes = p->step * 4,
        .strip = p->strip,
        .x = p->x + row * p->call->x_stride + first * 4,
        .x_stride = p->call->x_stride,
        .total = p->total + row * PANEL_COLUMNS,
        .is_first = p->is_first && !first,
        .turns = turns,
        .after = p->ahead ? (const float *)p->ahead : weight,
    };
}

/* All steps of up to 32 rows, `turns` times as many from `first` on as a register is set for. */
FN void multiply_deep(struct multiplier *m, const struct product *p, int64_t rows, int64_t first, int64_t turns, int steps) {
    const int is_last = first + turns * steps == p->steps;
    struct block b = block_at(p, 0, first, turns);
    set_extents(m, (int)rows, steps);
    if (is_last) ask_for_rows(p, 0, rows, BFLOAT16);
    if (rows <= REGISTER_ROWS) {
        multiply_rows(&b, NULL);
    } else {
        const float *after = b.after;
        b.after = b.weight + 2 * b.strip;
        multiply_pair(&b);
        b.weight += 2 * b.strip;
        b.total += 2 * LANES;
        b.after = after;
        multiply_pair(&b);
    }
    if (is_last) store_rows(p, 0, rows, BFLOAT16);
}

/* The same of a chunk, for any number of rows. */
FN void multiply_steps(struct multiplier *m, const struct product *p, int64_t rows, int64_t first, int64_t turns, int steps, int64_t lines) {
    const int is_last = p->is_last && first + turns * steps == p->steps;
    const int64_t strip_bytes = p->call->in_strips ? p->strip * 4 : 0;
    for (int64_t row = 0, end; row < rows; row = end) {
        end = row + REGISTER_ROWS < rows ? row + REGISTER_ROWS : rows;
        int64_t begin_line = lines * row / rows, end_line = lines * end / rows;
        struct share share = {p->ahead, strip_bytes, begin_line, end_line - begin_line, turns * 4, 0};
        struct block b = block_at(p, row, first, turns);
        set_extents(m, (int)(end - row), steps);
        if (is_last) ask_for_rows(p, row, end - row, BFLOAT16);
        multiply_rows(&b, &share);
        if (is_last) store_rows(p, row, end - row, BFLOAT16);
    }
}

FN void multiply_chunk(struct multiplier *m, const struct product *p, int64_t rows, int dtype) {
    (void)dtype;
    if (p->reader) decode_chunk(p->pairs, p->reader, p->steps);
    int64_t turns = p->steps / REGISTER_ROWS, rest = p->steps % REGISTER_ROWS;
    if (p->call->in_strips && rows <= DEEP_ROWS) {
        if (turns) multiply_deep(m, p, rows, 0, turns, REGISTER_ROWS);
        if (rest) multiply_deep(m, p, rows, p->steps - rest, 1, (int)rest);
        return;
    }
    if (turns) multiply_steps(m, p, rows, 0, turns, REGISTER_ROWS, p->ahead_lines);
    if (rest) multiply_steps(m, p, rows, p->steps - rest, 1, (int)rest, turns ? 0 : p->ahead_lines);
}
#endif
