/* Low-rank adapters: out += scale * up (down x), in one call for rows with different adapters.
 *
 * The structures are mirrored field by field in `quire/kernels/adapters/cpu_adapters.py`. A change of a structure must raise QUIRE_ABI in attention.h
 * and ABI in native_library.py.
 */
#ifndef QUIRE_ADAPTER_H
#define QUIRE_ADAPTER_H

#include <stdint.h>

#include "attention.h" /* enum dtype, enum isa, LANES */
#include "team.h"

enum {
    ADAPTER_RANK = 64,    /* largest rank */
    ADAPTER_PARTS = 3,    /* most linear layers that one product merges: q, k and v */
    ADAPTER_COLUMNS = 64, /* columns of a panel of `up` */
    RANK_BLOCK = 4,       /* ranks of a unit of work */
};

/* One adapter of one linear layer. */
struct adapter_part {
    const char *down; /* [rank, depth rounded up to LANES] */
    const char *up;   /* [panels, rank, ADAPTER_COLUMNS] */
    int64_t rank;     /* 0: the adapter leaves this layer as it is */
    float scale;
};

/* Consecutive rows with the same adapter. */
struct adapter_piece {
    int64_t begin, end, slot;
};

/* The rows of a step, the same for all products. */
struct adapter_step {
    const struct adapter_piece *pieces;
    int64_t num_pieces;
    float *inner; /* [rows, ADAPTER_PARTS, ADAPTER_RANK]: down x */
};

/* Arguments of both calls, of `down` and of `up`. */
struct adapter_call {
    const char *x;    /* [rows, depth], rows contiguous; only `down` reads it */
    int64_t x_stride; /* bytes between rows */
    char *out;        /* [rows, sum of columns], rows contiguous, dtype of x; only `up` changes it */
    int64_t out_stride;
    const struct adapter_part *parts; /* [slots, num_parts] */
    const struct adapter_step *step;
    int64_t num_parts, columns[ADAPTER_PARTS]; /* of each linear layer that the product merges */
    int64_t depth, rank, dtype;                /* rank: the largest of all slots */
    struct team *team;                         /* distributes the units; set by the library */
};

static inline int64_t adapter_rank_blocks(const struct adapter_call *c) { return (c->rank + RANK_BLOCK - 1) / RANK_BLOCK; }

static inline int64_t adapter_panels(int64_t columns) { return (columns + ADAPTER_COLUMNS - 1) / ADAPTER_COLUMNS; }

void quire_adapter_down_job(struct job *job, struct adapter_call *call, int64_t isa, int64_t num_threads);
void quire_adapter_up_job(struct job *job, struct adapter_call *call, int64_t isa, int64_t num_threads);

#define DECLARE_ADAPTER(isa) \
    int64_t quire_adapter_down_##isa(void *call); \
    int64_t quire_adapter_up_##isa(void *call);
DECLARE_ADAPTER(generic)
#if defined(__x86_64__)
DECLARE_ADAPTER(avx2)
DECLARE_ADAPTER(avx512)
#endif

#endif
