/* Recurrent layers: short convolutions and state scans over the rows of a step.
 *
 * The structures are mirrored field by field in `quire/kernels/recurrence/cpu_recurrence.py`. A change of a structure must raise QUIRE_ABI in
 * attention.h and ABI in native_library.py.
 */
#ifndef QUIRE_RECURRENCE_H
#define QUIRE_RECURRENCE_H

#include <stdint.h>

#include "attention.h" /* enum dtype, enum isa, LANES */
#include "team.h"

enum {
    CONV_BLOCK = 256, /* channels of a unit of a convolution */
    MAX_TAPS = 8,
    SCAN_BLOCK = 64,  /* columns of a state in a unit of a scan */
    MAX_KEY_DIM = 256,
};

/* Rows of a step. Row i has the tokens [cu_q[i], cu_q[i + 1]). */
struct recurrent_rows {
    const int32_t *cu_q;      /* [rows + 1] */
    const int64_t *slots;     /* [rows] */
    const uint8_t *fresh;     /* [rows] 1: there are no earlier tokens, so the row begins with a state of zeros */
    const int64_t *saves;     /* [saves, 3] row, number of its tokens before the snapshot, slot; sorted by row, then by number */
    const int64_t *first_save; /* [rows + 1] the saves of row i are [first_save[i], first_save[i + 1]) */
    int64_t rows;
};

/* out[t, c] = act(bias[c] + sum_j weight[j, c] x[t - taps + 1 + j, c]) */
struct conv_call {
    const float *x;           /* [tokens, channels], tokens contiguous */
    int64_t x_stride;         /* elements between tokens */
    float *out;               /* [tokens, channels], contiguous */
    const float *weight;      /* [taps, channels] */
    const float *bias;        /* [channels] or NULL */
    char *states;             /* [slots][taps, channels] the last inputs, oldest first */
    int64_t slot_stride;      /* bytes */
    int64_t channels, taps, dtype; /* dtype of the states */
    int64_t silu;             /* 1: act is SiLU, 0: the identity */
    struct recurrent_rows rows;
    struct team *team;
};

/* S = decay S + k u, out = q S; u = v, or with `beta` u = beta (v - decay k S). */
struct scan_call {
    const float *q, *k;       /* [tokens, key_heads, key_dim] */
    const float *v;           /* [tokens, heads, value_dim] */
    int64_t q_stride, k_stride, v_stride; /* elements between tokens */
    const float *decay;       /* [tokens, heads] */
    const float *beta;        /* [tokens, heads] or NULL */
    float *out;               /* [tokens, heads, value_dim], contiguous */
    char *states;             /* [slots][heads, key_dim, value_dim] float32 */
    int64_t slot_stride;      /* bytes */
    int64_t heads, key_heads, key_dim, value_dim;
    struct recurrent_rows rows;
    struct team *team;
};

#define DECLARE_RECURRENCE(isa) \
    int64_t quire_conv_##isa(void *call); \
    int64_t quire_scan_##isa(void *call);
DECLARE_RECURRENCE(generic)
#if defined(__x86_64__)
DECLARE_RECURRENCE(avx2)
DECLARE_RECURRENCE(avx512)
#endif

#endif
