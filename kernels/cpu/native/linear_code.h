/* bfloat16 weights in 12 bits, without loss.
 *
 * The low byte of a weight, the exponent's last bit and the fraction, is as good as random. The high byte, the sign and the rest of the
 * exponent, takes few values: 16 of them, chosen for each panel, leave out some 8 of 100,000 normally distributed weights. A number of 4 bits
 * stands for each. A step that has another value in it, one in a hundred, has its high bytes written out beside the panels.
 *
 *     panel   | step 0: 64 bytes of numbers, 128 low bytes | step 1: .. | ...                 192 bytes a step instead of 256
 *     beside  | step 17: 128 high bytes | step 203: .. | ...
 *
 * The 128 weights of a step, four vectors v of 32 elements e, lie so that vectors come from interleaving low and high bytes 8 at a time, which
 * is one instruction for 16, 32 or 64 of them:
 *
 *     place(v, e) = v / 2 * 64 + e / 8 * 16 + v % 2 * 8 + e % 8
 *
 * Places i and 64 + i share a byte of numbers, the first in its lower half.
 */
#ifndef QUIRE_LINEAR_CODE_H
#define QUIRE_LINEAR_CODE_H

#include <stdint.h>

enum {
    STEP_WEIGHTS = 128,
    NUMBER_BYTES = STEP_WEIGHTS / 2,
    CODED_STEP_BYTES = NUMBER_BYTES + STEP_WEIGHTS,
    TABLE_BYTES = 16,
};

/* Mirrored in `quire/kernels/cpu/weight_code.py`. */
struct weight_code {
    const uint8_t *tables; /* [panels][TABLE_BYTES]: the high byte that a number stands for */
    const int64_t *first;  /* [panels] of the next two, where a panel's begin */
    const int32_t *apart;  /* a panel's steps that are written out, in order, then -1 */
    const uint8_t *high;   /* [..][STEP_WEIGHTS] of each, 64-byte aligned */
};

/* Where a thread is in a panel. */
struct reader {
    const uint8_t *now, *table;
    const int32_t *apart; /* the next step that is written out */
    const uint8_t *high;  /* its high bytes */
    int32_t step;
};

static inline struct reader read_panel(const struct weight_code *code, const void *panels, int64_t steps, int64_t panel) {
    return (struct reader){
        .now = (const uint8_t *)panels + panel * steps * CODED_STEP_BYTES,
        .table = code->tables + panel * TABLE_BYTES,
        .apart = code->apart + code->first[panel],
        .high = code->high + code->first[panel] * STEP_WEIGHTS,
        .step = 0,
    };
}

static inline int64_t code_place(int64_t vector, int64_t element) {
    return vector / 2 * 64 + element / 8 * 16 + vector % 2 * 8 + element % 8;
}

#endif
