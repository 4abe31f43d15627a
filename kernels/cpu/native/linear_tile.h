/* A packed GEMM in vector registers; included once for each instruction set.
 *
 * All rows of a unit use a chunk of a panel, one register tile after the other, each of up to BLOCK_ROWS rows x MAX_VECTORS vectors of
 * columns. Each tile prefetches its share of the next chunk. Coded weights are decoded in registers if a tile has all columns, and stored as
 * pairs if other tiles follow (DOT_BF16); otherwise the chunk is decoded first. Up to STREAM_ROWS rows of uncoded bfloat16 read several
 * chunks in parallel instead, without prefetches:
 *
 *     panel  | chunk 0 | chunk 1 | chunk 2 | chunk 3 | ...          STREAM_STEPS steps at each arrow, then the next of each
 *              ^         ^         ^         ^
 *
 * An element of y is a sum in one lane: the steps of a chunk in order, then the chunks in order; then bias and
 * residual are added. The other rows, columns and threads do not change it: a row's bits depend on that row alone. In float32 they are
 * the same on every instruction set with a fused multiply-add.
 *
 * Without an instruction for pairs of bfloat16 both factors are widened to float32, which changes no bit. x is widened one chunk at a time,
 * once for all columns of the panel. Weights are widened in registers for a few rows. For WIDE_ROWS rows and more they are widened in
 * memory, 16 columns of the chunk at a time, which stay in the L1 cache while all rows use them.
 *
 * The including file includes its simd_*.h before and defines: FN, TARGETED (function attributes); LINEAR_WORKER (name of the function);
 * DOT_BF16; BLOCK_ROWS, the rows of a tile (2, 6 or 12); PAIR_ROWS, the rows of a tile that widens weights in registers; VECTORS_OF(rows), the
 * vectors of a tile (1, 2 or 4), and their maximum MAX_VECTORS; WIDE_ROWS (0: never); STREAM_ROWS (0: never, 1 or 2); AHEAD_LEVEL, the cache
 * level of prefetches (3: the first, 2: the second); AHEAD_FROM, the rows of a unit from which the next chunk is prefetched; FOLLOWS_CACHE,
 * whether a large L1 cache gets prefetches of the next chunk, and of the next lines for a few rows.
 */
#define ONLY_BF16 DOT_BF16
#define MOST_ROWS MAX_UNIT_ROWS
#define READS_STRIPS 0

#if DOT_BF16
struct multiplier {
    char nothing;
};
#else
struct multiplier { /* a chunk widened to float32 */
    _Alignas(64) float x[MAX_UNIT_ROWS * 2 * CHUNK]; /* [rows][2 * chunk_steps] */
    float weight[2 * CHUNK][LANES];
};
#endif

enum {
    STREAMS = 4,
    STREAM_STEPS = 2,   /* 512 bytes of a stream */
    STREAM_CHUNKS = 32, /* chunks whose sums are kept before they are added to the total: 4096 steps of depth */
    NEAR_BYTES = 4096,    /* prefetch distance for a few rows; 1 KiB is 10% slower (Zen 5) */
    ALONE_BYTES = 6144,   /* prefetch distance for one row, on the next page; 2, 8 and 16 KiB are 2 to 4% slower (Zen 4) */
    FURTHER_BYTES = 4096, /* additional distance of prefetches of the next chunk, to the L2 cache; 0 is 4 to 9% slower from 24 rows on (Zen 4) */
};

#include "linear_unit.h"

FN void begin_multiplying(struct multiplier *m) { (void)m; }

FN void end_multiplying(struct multiplier *m) { (void)m; }

FN int64_t chunk_steps(const struct linear_call *c, int64_t rows) {
    if (c->groups) return c->groups->group_steps < CHUNK ? c->groups->group_steps : CHUNK;
    const int is_streamed = rows <= STREAM_ROWS && c->dtype == BFLOAT16 && !c->scales && !c->code && !c->in_strips;
    return is_streamed ? STREAM_CHUNKS * CHUNK : CHUNK;
}

/* Source of a tile's weights. */
enum source {
    AS_THEY_LIE, /* memory */
    FROM_CODE,   /* coded weights, for all columns */
    KEEP_PAIRS,  /* coded weights, for all columns; the decoded pairs are stored for later tiles */
};

/* A step's weights, 32 bits per lane: decoded ones, or from memory. */
#define STEP_WEIGHT(v) (decoded ? decoded[v] : v_load(weight + (v) * LANES))

/* sum[r][v] += one step of `rows` rows and `vectors` vectors of columns. */
FN void multiply_step(v16 sum[BLOCK_ROWS][MAX_VECTORS], const float *weight, const v16 *decoded, const float *const x[BLOCK_ROWS],
                      int64_t step, int rows, int vectors, int dtype) {
    v16 w[MAX_VECTORS];
#if DOT_BF16
    (void)dtype;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) w[v] = STEP_WEIGHT(v);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)x[r])[step]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w[v], pair);
    }
#else
    const int halves = dtype == BFLOAT16 ? 2 : 1;
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            w[v] = STEP_WEIGHT(v);
            if (dtype == BFLOAT16) w[v] = half ? v_bfloat_high(w[v]) : v_bfloat_low(w[v]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            v16 element = v_set1(x[r][halves * step + half]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] = v_fma(element, w[v], sum[r][v]);
        }
    }
#endif
}

/* Prefetches while a chunk is multiplied, of which every tile does a share. */
struct prefetch {
    const char *begin;
    int64_t lines;     /* in total */
    int64_t done, all; /* tiles, counted by their vectors of columns */
    int is_first;      /* prefetch to the L1 cache instead of AHEAD_LEVEL */
    int is_near;       /* instead of the next chunk, prefetch NEAR_BYTES ahead of the reads, or ALONE_BYTES for one row and uncoded weights */
};

/* Prefetch `lines` lines at `bytes` after `begin`; `level` is a literal. */
#define ASK_LINES(begin, lines, bytes, level) \
    _Pragma("GCC unroll 4") for (int i = 0; i < lines; i++) \
        __builtin_prefetch((const char *)(begin) + i * CACHE_LINE + (bytes), 0, level);

FN void ask_for(const struct prefetch *prefetch, const char *line) {
    if (FOLLOWS_CACHE && prefetch->is_first)
        __builtin_prefetch(line, 0, 3);
    else
        __builtin_prefetch(line, 0, AHEAD_LEVEL);
}

/* Multiply one register tile over a chunk; `weight` is that of its first column. A few lines are prefetched during the first steps. Many lines
 * are spread over all steps, because after a burst the memory would be idle. */
FN void multiply_tile(const struct product *p, struct prefetch *prefetch, const float *weight, int64_t row, int vector,
                      int rows, int vectors, int dtype, int source) {
    v16 sum[BLOCK_ROWS][MAX_VECTORS];
    const float *x[BLOCK_ROWS];
    const int is_coded = source != AS_THEY_LIE;
    struct reader reader = {0};
    if (is_coded) reader = *p->reader;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        x[r] = (const float *)(p->x + (row + r) * p->x_stride);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = v_set1(0.0f);
    }
    const char *ahead = prefetch->begin + prefetch->lines * prefetch->done / prefetch->all * CACHE_LINE;
    prefetch->done += vectors;
    const char *ahead_end = prefetch->begin + prefetch->lines * prefetch->done / prefetch->all * CACHE_LINE;
    int64_t lines = (ahead_end - ahead) / CACHE_LINE, step = 0, due = 0;
#define MULTIPLY_STEP \
    v16 decoded[PANEL_VECTORS]; \
    if (is_coded) read_step(decoded, &reader); \
    if (source == KEEP_PAIRS) store_step(p->pairs + step * PANEL_COLUMNS, decoded); \
    multiply_step(sum, weight + step * p->step, is_coded ? decoded : NULL, x, step, rows, vectors, dtype);
    if (FOLLOWS_CACHE && rows == 1 && prefetch->is_near) {
        for (; step < p->steps; step++) {
            ASK_LINES(weight + step * p->step, vectors, ALONE_BYTES, 2)
            MULTIPLY_STEP
        }
    } else if (FOLLOWS_CACHE && prefetch->is_near) {
        for (; step < p->steps; step++) {
            if (is_coded) {
                ASK_LINES(reader.now, CODED_STEP_BYTES / CACHE_LINE, NEAR_BYTES, 3)
            } else {
                ASK_LINES(weight + step * p->step, vectors, NEAR_BYTES, 3)
            }
            MULTIPLY_STEP
        }
    } else if (lines <= p->steps) {
        for (; step < lines; step++, ahead += CACHE_LINE) {
            ask_for(prefetch, ahead);
            MULTIPLY_STEP
        }
        for (; step < p->steps; step++) {
            MULTIPLY_STEP
        }
    } else {
        for (; step < p->steps; step++) {
            for (due += lines; due >= p->steps; due -= p->steps, ahead += CACHE_LINE) ask_for(prefetch, ahead);
            MULTIPLY_STEP
        }
    }
#undef MULTIPLY_STEP
    if (is_coded) *p->reader = reader;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *total = p->total + (row + r) * PANEL_COLUMNS + (vector + v) * LANES;
            if (p->group_scales) {
                const v16 scale = v_load(p->group_scales + (vector + v) * LANES);
                v_store(total, p->is_first ? v_mul(sum[r][v], scale) : v_fma(sum[r][v], scale, v_load(total)));
            } else {
                v_store(total, p->is_first ? sum[r][v] : v_add(v_load(total), sum[r][v]));
            }
        }
    }
}

/* Multiply all rows, in tiles of nearly equal height, with `vectors` vectors of the panel's columns, beginning with vector `first`, for which
 * p->weight is given. `dtype` is that of the factors in memory. */
FN void multiply_columns(const struct product *p, struct prefetch *prefetch, int64_t rows, int first, int vectors, int dtype,
                         int out_dtype) {
    const int most = dtype == BFLOAT16 ? PAIR_ROWS : BLOCK_ROWS;
    const int is_complete = p->is_last && first + vectors == PANEL_VECTORS, is_coded = p->reader != NULL;
    int64_t tiles = (rows + most - 1) / most, row = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t height = (rows - row + tiles - tile - 1) / (tiles - tile);
        if (is_complete) ask_for_rows(p, row, height, out_dtype);
#define TILES_OF(count) \
    case count: \
        if (count <= most) { \
            const int wide = VECTORS_OF(count) < vectors ? VECTORS_OF(count) : vectors; \
            if (wide == PANEL_VECTORS && is_coded && tiles == 1) { \
                multiply_tile(p, prefetch, p->weight, row, 0, count, PANEL_VECTORS, dtype, FROM_CODE); \
            } else if (DOT_BF16 && wide == PANEL_VECTORS && is_coded && tile == 0) { \
                multiply_tile(p, prefetch, p->weight, row, 0, count, PANEL_VECTORS, dtype, KEEP_PAIRS); \
            } else { \
                for (int v = 0; v < vectors; v += wide) \
                    multiply_tile(p, prefetch, p->weight + v * LANES, row, first + v, count, wide, dtype, AS_THEY_LIE); \
            } \
        } \
        break;
        switch (height) {
            TILES_OF(1)
            TILES_OF(2)
#if BLOCK_ROWS > 2
            TILES_OF(3)
            TILES_OF(4)
            TILES_OF(5)
            TILES_OF(6)
#endif
#if BLOCK_ROWS > 6
            TILES_OF(7)
            TILES_OF(8)
            TILES_OF(9)
            TILES_OF(10)
            TILES_OF(11)
            TILES_OF(12)
#endif
        }
#undef TILES_OF
        if (is_complete) store_rows(p, row, height, out_dtype);
        row += height;
    }
}

#if !DOT_BF16
FN struct product widen_x(struct multiplier *m, const struct product *p, int64_t rows) {
    int64_t stride = 2 * chunk_steps(p->call, rows);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < 2 * p->steps; i += LANES)
            v_store(m->x + r * stride + i, load_part(p->x + r * p->x_stride, i, 2 * p->steps, BFLOAT16));
    struct product widened = *p;
    widened.x = (const char *)m->x;
    widened.x_stride = stride * (int64_t)sizeof m->x[0];
    return widened;
}
#endif

#if STREAM_ROWS
/* Multiply STREAMS equal parts of the depth in parallel: hardware prefetchers have more lines in flight for several streams than for one. Every
 * chunk has a sum of its own, and the sums are added in order, so the bits are those of one chunk after the other. */
FN void multiply_streams(const struct product *p, int rows, int out_dtype) {
    _Alignas(64) float sums[STREAM_CHUNKS][STREAM_ROWS][PANEL_COLUMNS];
    const float *x[BLOCK_ROWS];
    for (int r = 0; r < rows; r++) x[r] = (const float *)(p->x + r * p->x_stride);
    if (p->is_last) ask_for_rows(p, 0, rows, out_dtype);
    const int wide = VECTORS_OF(rows);
    int64_t chunks = (p->steps + CHUNK - 1) / CHUNK, length = (chunks + STREAMS - 1) / STREAMS * CHUNK;
    for (int64_t begin = 0; begin < length; begin += STREAM_STEPS) {
        for (int64_t first = begin; first < p->steps; first += length) {
            int64_t end = first + STREAM_STEPS < p->steps ? first + STREAM_STEPS : p->steps;
            const int is_new = first % CHUNK == 0;
            for (int vector = 0; vector < PANEL_VECTORS; vector += wide) {
                v16 sum[BLOCK_ROWS][MAX_VECTORS];
                float *kept = sums[first / CHUNK][0] + vector * LANES;
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < wide; v++) sum[r][v] = is_new ? v_set1(0.0f) : v_load(kept + r * PANEL_COLUMNS + v * LANES);
                for (int64_t step = first; step < end; step++)
                    multiply_step(sum, p->weight + step * p->step + vector * LANES, NULL, x, step, rows, wide, BFLOAT16);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < wide; v++) v_store(kept + r * PANEL_COLUMNS + v * LANES, sum[r][v]);
            }
        }
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < PANEL_COLUMNS; i += LANES) {
                float *total = p->total + r * PANEL_COLUMNS + i;
                v16 sum = v_load(sums[chunk][r] + i);
                v_store(total, p->is_first && chunk == 0 ? sum : v_add(v_load(total), sum));
            }
        }
    }
    if (p->is_last) store_rows(p, 0, rows, out_dtype);
}
#endif

/* Multiply with multiply_streams if the number of rows is small enough; returns whether it did. */
FN int multiply_streamed(const struct product *p, int64_t rows) {
#if STREAM_ROWS
    if (chunk_steps(p->call, rows) > CHUNK) {
        if (rows == 1) multiply_streams(p, 1, BFLOAT16);
#if STREAM_ROWS > 1
        if (rows == 2) multiply_streams(p, 2, BFLOAT16);
#endif
        return 1;
    }
#else
    (void)p, (void)rows;
#endif
    return 0;
}

#if WIDE_ROWS
/* Multiply the chunk in float32, which has twice as many steps. */
FN void multiply_widened(struct multiplier *m, const struct product *pairs, struct prefetch *prefetch, int64_t rows) {
    struct product p = *pairs;
    p.weight = m->weight[0];
    p.step = LANES;
    p.steps = 2 * pairs->steps;
    for (int vector = 0; vector < PANEL_VECTORS; vector++) {
        for (int64_t step = 0; step < pairs->steps; step++) {
            v16 pair = v_load(pairs->weight + step * pairs->step + vector * LANES);
            v_store(m->weight[2 * step], v_bfloat_low(pair));
            v_store(m->weight[2 * step + 1], v_bfloat_high(pair));
        }
        multiply_columns(&p, prefetch, rows, vector, 1, FLOAT32, BFLOAT16);
    }
}
#endif

FN void multiply_chunk(struct multiplier *m, const struct product *as_read, int64_t rows, int dtype) {
    const int is_wide = WIDE_ROWS && dtype == BFLOAT16 && rows >= WIDE_ROWS;
    const int most = dtype == BFLOAT16 && !is_wide ? PAIR_ROWS : BLOCK_ROWS;
    const int64_t tiles = (rows + most - 1) / most;
    const int is_decoded_in_registers = !is_wide && MAX_VECTORS == PANEL_VECTORS && VECTORS_OF((rows + tiles - 1) / tiles) == PANEL_VECTORS &&
                                        (DOT_BF16 || tiles == 1);
    struct product chunk = *as_read, *p = &chunk;
    if (p->reader && !is_decoded_in_registers) {
        decode_chunk(p->pairs, p->reader, p->steps);
        p->reader = NULL;
    }
    const int goes_further = FOLLOWS_CACHE && p->ahead && !p->call->holds_two_chunks;
    struct prefetch prefetch = {.begin = p->ahead + (goes_further ? FURTHER_BYTES : 0),
                                .lines = rows < AHEAD_FROM ? 0 : p->ahead_lines,
                                .all = tiles * PANEL_VECTORS,
                                .is_first = FOLLOWS_CACHE && p->call->holds_two_chunks && !p->call->code && !p->call->groups, /* the pairs of coded weights fill it */
                                .is_near = FOLLOWS_CACHE && (p->call->holds_two_chunks ? rows > 1 && rows < AHEAD_FROM && !p->group_scales : rows == 1 && !p->reader)};
#if !DOT_BF16
    if (dtype == BFLOAT16) {
        struct product widened = widen_x(m, p, rows);
#if WIDE_ROWS
        if (is_wide) {
            multiply_widened(m, &widened, &prefetch, rows);
            return;
        }
#endif
        if (multiply_streamed(&widened, rows)) return;
        multiply_columns(&widened, &prefetch, rows, 0, PANEL_VECTORS, BFLOAT16, BFLOAT16);
        return;
    }
#endif
    (void)m;
    if (DOT_BF16 && multiply_streamed(p, rows)) return;
    multiply_columns(p, &prefetch, rows, 0, PANEL_VECTORS, dtype, dtype);
}
