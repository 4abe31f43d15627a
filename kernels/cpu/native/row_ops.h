/* The operations of a decoder layer between its GEMMs: arguments of the three calls.
 *
 * The structures are mirrored field by field in `quire/kernels/cpu/cpu_row_ops.py`. A change of a structure must raise QUIRE_ABI in attention.h and
 * ABI in native_library.py.
 */
#ifndef QUIRE_LAYER_H
#define QUIRE_LAYER_H

#include <stdint.h>

#include "attention.h" /* enum dtype, enum isa, LANES, MAX_HEAD_DIM */
#include "team.h"

enum { UNIT_ROWS = 4 };

/* out = x / rms(x) * weight */
struct norm_call {
    const char *x;          /* [rows, columns], rows contiguous */
    int64_t x_stride;       /* bytes between rows */
    char *out;              /* [rows, columns], rows contiguous, dtype of x */
    int64_t out_stride;     /* bytes between rows */
    const float *weight;    /* [columns rounded up to LANES] */
    int64_t rows, columns, dtype;
    float eps;
    struct team *team;      /* distributes units of UNIT_ROWS rows; set by the library */
};

/* out = act(x[:, :columns]) * x[:, columns:] */
struct gated_call {
    const char *x;          /* [rows, 2 columns], rows contiguous */
    int64_t x_stride;       /* bytes between rows */
    char *out;              /* [rows, columns], rows contiguous */
    int64_t out_stride;     /* bytes between rows */
    int64_t rows, columns, dtype;
    int64_t gelu;           /* 0: SiLU, 1: GELU by tanh */
    struct team *team;
};

/* The arguments of a step, the same for all layers with the same heads. */
struct rotate_step {
    const int64_t *rows;    /* [tokens, kv_heads] rows of the pages */
    const char *cos, *sin;  /* [tokens, rotary], contiguous, dtype of qkv */
    int64_t tokens, rotary;
};

/* Norm and rotate the heads of q and k, and write k and v into their pages. */
struct rotate_call {
    const char *qkv;        /* [tokens, heads + 2 kv_heads, head_dim], tokens contiguous */
    int64_t qkv_stride;     /* bytes between tokens */
    char *q_out;            /* [tokens, heads, head_dim], contiguous */
    char *k_pages, *v_pages; /* [page_rows, head_dim] */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    struct rotate_step step;
    int64_t page_rows, heads, kv_heads, head_dim, dtype;
    float eps;
    struct team *team;
    int64_t outside;        /* number of rows outside the cache, which are not written */
};

/* Set the counters of a call and choose the worker for `isa`. */
void quire_norm_job(struct job *job, struct norm_call *call, int64_t isa, int64_t num_threads);
void quire_gated_job(struct job *job, struct gated_call *call, int64_t isa, int64_t num_threads);
void quire_rotate_job(struct job *job, struct rotate_call *call, int64_t isa, int64_t num_threads);

#define DECLARE_LAYER(isa) \
    int64_t quire_norm_##isa(void *call); \
    int64_t quire_gated_##isa(void *call); \
    int64_t quire_rotate_##isa(void *call);
DECLARE_LAYER(generic)
#if defined(__x86_64__)
DECLARE_LAYER(avx2)
DECLARE_LAYER(avx512)
#endif

#endif
