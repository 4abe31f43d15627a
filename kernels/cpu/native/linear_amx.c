/* The packed GEMM in bfloat16 on processors with matrix registers (Intel's AMX).
 *
 * One instruction multiplies 16 rows x 16 steps with 16 steps x 16 columns. The rows of a unit are processed 16 at a time with all columns of
 * the panel, in four registers of sums. So x is read once for four products. The chunk of the panel, which all rows read, stays in the
 * L1 cache, because loads of x bypass it. With 32 x 32 sums, or with chunks of the whole depth, the L2 cache was the limit,
 * and a GEMM was 25% slower.
 *
 * Up to 32 rows the memory is the limit. They read a panel once, over its whole depth: up to 16 rows read four strips in parallel, more rows
 * two strips and then the other two.
 *
 * An element of y is a sum in float32. For 16 steps at a time, in order, the hardware adds up the first elements of the pairs and the second
 * elements separately, and then adds both to the previous sum. So chunks change no bit, and a row's bits depend on that row alone.
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
    int rows, steps; /* current setting of the extents */
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

/* Registers for up to 16 rows: 0 to 3 for sums, 4 for x, 5 to 7 for weights. For up to 32 rows: 0 and 2 for sums of the first 16 rows, 1 and 3 for
 * sums of the others, 4 and 5 for their x, 6 and 7 for weights. */
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

/* Most rows that read the whole depth of a panel at once: each weight is loaded from memory once and used for all rows. More rows read each chunk
 * several times, from the L1 cache. */
enum { DEEP_ROWS = 2 * REGISTER_ROWS };

FN int64_t chunk_steps(const struct linear_call *c, int64_t rows) { return c->in_strips && rows <= DEEP_ROWS ? c->steps : CHUNK; }

/* Lines of a chunk to prefetch, an equal share in each of `turns` iterations. Lines of strips alternate, because strips are read in parallel. */
struct share {
    const char *chunk;
    int64_t strip_bytes; /* 0: the lines are contiguous */
    int64_t line, lines, turns, due;
};

FN void prefetch_share(struct share *s) {
    for (s->due += s->lines; s->due >= s->turns; s->due -= s->turns, s->line++) {
        int64_t offset = s->strip_bytes ? s->line % PANEL_VECTORS * s->strip_bytes + s->line / PANEL_VECTORS * CACHE_LINE : s->line * CACHE_LINE;
        __builtin_prefetch(s->chunk + offset, 0, 2);
    }
}

/* Prefetch a strip 512 bytes ahead, to the L1 cache; `after` is the strip's address after this iteration. Four strips at the same time at
 * this small distance use 20% more of the memory's bandwidth than one run of lines a chunk ahead, because hardware prefetchers recognise them. */
FN void prefetch_strip(const char *strip, const char *after) {
    enum { TURN_LINES = REGISTER_ROWS * LANES * 4 / CACHE_LINE, NEAR_LINES = TURN_LINES / 2 };
#pragma GCC unroll 8
    for (int i = NEAR_LINES; i < TURN_LINES; i++) __builtin_prefetch(strip + i * CACHE_LINE, 0, 3);
#pragma GCC unroll 8
    for (int i = 0; i < NEAR_LINES; i++) __builtin_prefetch(after + i * CACHE_LINE, 0, 3);
}

/* The multiplication of some rows of a unit with some steps of a chunk. */
struct block {
    const float *weight;
    int64_t step_bytes, strip; /* distance of the weights' steps in bytes, of their strips in elements */
    const char *x;
    int64_t x_stride;          /* bytes */
    float *total;
    int is_first;              /* whether total is undefined */
    int64_t turns;             /* iterations, each over the steps of one register */
    const float *after;        /* address of the weights after the last iteration */
};

enum { TOTAL_BYTES = PANEL_COLUMNS * 4 }; /* between rows of the sums */

/* Load the four registers of sums from the totals, or set them to zero. */
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

/* Multiply up to 16 rows with the panel's columns. Prefetches are placed between the loads, a few lines at a time: with one burst per iteration,
 * one row read its weights 14% slower. They are those of `share`, or, if it is NULL, the next lines of the strips. */
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

/* Multiply 17 to 32 rows with two strips. */
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

/* Multiply up to 32 rows with all columns, over `turns` times `steps` steps beginning at `first`. */
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

/* Multiply any number of rows with a chunk, over `turns` times `steps` steps beginning at `first`. */
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
