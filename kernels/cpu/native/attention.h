/* Declarations that the attention sources share: the arguments of a call, the list of work units, the state of a query row.
 *
 * `struct attention_call`, `struct query_tile` and `struct work_unit` are mirrored field by field in
 * `quire/kernels/cpu/cpu_attention_native.py` and `cpu_attention_work.py`. A change of any structure must raise QUIRE_ABI in C and Python.
 */
#ifndef QUIRE_ATTENTION_H
#define QUIRE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "team.h"

#define QUIRE_ABI 20

enum {
    RUN = 8,                     /* tokens that are contiguous in every block: block sizes are multiples of it */
    LANES = 16,                  /* keys of one vector of scores */
    TILE = 128,                  /* keys between two updates of the running maximum */
    SPLIT = 512,                 /* keys of one partial softmax; tiles and splits begin at absolute multiples of their size */
    MAX_ROWS = 256,              /* query rows, tokens x heads of a KV group, that share a tile's packed keys */
    MAX_HEAD_DIM = 512,
    MAX_ITEM_HEADS = MAX_ROWS / LANES, /* most KV heads of one item */
};

enum dtype { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

enum isa { GENERIC = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX_BF16 = 4 };

/* Whether the compiler supports AMX and the operating system has a call by which a process may ask for it. */
#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

/* A tile with branches is a trunk: it has the tokens of all its branches, and its keys are in blocks that their rows share. The branches
 * follow it in the list. Each continues where the trunk's keys end, with its own tokens and its own row's blocks. */
struct query_tile {
    int64_t first_token, num_tokens; /* in the order of the plan */
    int64_t row;                     /* its row of the block tables */
    int64_t key_begin, key_end;      /* keys that some of its tokens see; a branch's key_begin is the trunk's */
    int64_t first_partial;           /* its first row of `partials`, num_tokens x heads for each split; -1: not split */
    int64_t branches;                /* number of branches; 0: not a trunk */
};

/* Number of splits that contain keys of the tile. */
static inline int32_t tile_splits(const struct query_tile *tile) {
    return (int32_t)((tile->key_end + SPLIT - 1) / SPLIT - tile->key_begin / SPLIT);
}

struct work_unit {
    int64_t tile;                   /* index of the tile, which is not a branch */
    int64_t split_begin, split_end; /* absolute indices of splits */
};

/* The plan of a step, the same for all its layers. */
struct attention_plan {
    const int64_t *block_tables;         /* [rows, table_stride] */
    int64_t table_stride;
    const int64_t *tokens;               /* [tokens] flat query tokens in the order of the tiles */
    const int64_t *key_begin, *key_end;  /* [tokens] keys that each of `tokens` sees */
    const struct query_tile *tiles;
    const struct work_unit *units;       /* most expensive first */
    int64_t num_tiles, num_units;
    float *partials;                     /* [partials, row_floats()] of tiles that are split into several units */
    int32_t *missing;                    /* [tiles * kv_heads] splits of such a tile that are not finished */
    char *scratch;                       /* [threads, scratch_stride], 64-byte aligned */
    int64_t scratch_stride;              /* bytes */
};

struct attention_call {
    const void *q;                       /* [tokens, heads, head_dim] */
    int64_t q_token_stride, q_head_stride; /* elements */
    const void *k, *v;                   /* [blocks, kv_heads, block_size, head_dim], the heads of a block contiguous */
    int64_t block_stride;                /* elements */
    void *out;                           /* [tokens, heads, head_dim], a token's heads contiguous */
    int64_t out_token_stride;            /* elements */
    const float *sinks;                  /* [heads] or NULL */
    struct attention_plan plan;
    int64_t dtype, heads, kv_heads, head_dim, block_size;
    float scale, softcap;                /* softcap 0: none */
    int64_t item_heads;                  /* KV heads of one item; set by the library */
    struct team *team;                   /* distributes the items; set by the library */
};

/* The running softmax of rows: maximum of the base-2 scores, 16 partial sums of the weights, weighted sum of the values. */
struct row_state {
    float *top;   /* [rows] */
    float *total; /* [rows, LANES] */
    float *mixed; /* [rows, padded head_dim] */
};

static inline int64_t padded_dim(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

/* Floats of a partial result: (top, 15 unused, total, mixed), so that every part is 64-byte aligned. */
static inline int64_t row_floats(int64_t head_dim) { return 2 * LANES + padded_dim(head_dim); }

/* States of a thread: the current split, and all splits before it; the same for a trunk. */
enum state { PART = 0, WHOLE = 1, TRUNK_PART = 2, TRUNK_WHOLE = 3, NUM_STATES = 4 };

/* The scratch memory of a thread. It holds the packed keys and values of one tile, in float32 or bfloat16, or of one split in bfloat16. */
struct scratch {
    float *k, *v;      /* [padded / 2, SPLIT] */
    float *q;          /* [MAX_ROWS, padded] */
    float *zeros;      /* [RUN, padded] */
    float *edges[2];   /* [RUN, padded] values of the first and the last run, if only a part of them is seen */
    float *scores;     /* [MAX_ROWS, TILE] scores of a tile, then its weights */
    float *factors;    /* [MAX_ROWS] factors of the previous sums */
    struct row_state states[NUM_STATES];
};

/* Set the pointers into `memory`, unless it is NULL; returns the bytes needed. A step is a pair of a key's elements, and AMX reads 16 steps
 * at a time. */
static inline int64_t place_scratch(struct scratch *s, char *memory, int64_t head_dim) {
    const int64_t padded = padded_dim(head_dim), steps = padded_dim((head_dim + 1) / 2), half = padded / 2 > steps ? padded / 2 : steps;
    int64_t bytes = 0;
#define TAKE(place, floats) \
    place = memory ? (float *)(memory + bytes) : NULL; \
    bytes += (floats) * (int64_t)sizeof(float);
    TAKE(s->k, half * SPLIT)
    TAKE(s->v, half * SPLIT)
    TAKE(s->q, MAX_ROWS * padded)
    TAKE(s->zeros, RUN * padded)
    TAKE(s->edges[0], RUN * padded)
    TAKE(s->edges[1], RUN * padded)
    TAKE(s->scores, MAX_ROWS * TILE)
    TAKE(s->factors, MAX_ROWS)
    for (int i = 0; i < NUM_STATES; i++) {
        TAKE(s->states[i].mixed, MAX_ROWS * padded)
        TAKE(s->states[i].total, MAX_ROWS * LANES)
        TAKE(s->states[i].top, MAX_ROWS)
    }
#undef TAKE
    return bytes;
}

/* Set the counters and choose the worker for `isa`, which is at most `quire_last_isa()`. */
void quire_attention_job(struct job *job, struct attention_call *call, int64_t isa, int64_t num_threads);

/* The functions of one instruction set: its worker, whether its items may have several heads, its exponential. */
#define DECLARE(isa) \
    int64_t quire_attention_##isa(void *call); \
    int64_t quire_takes_heads_##isa(const struct attention_call *call); \
    void quire_exp2_##isa(const float *x, float *y, int64_t count);
DECLARE(generic)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)
#endif
#if HAS_AMX
DECLARE(amx)
#endif

#endif
