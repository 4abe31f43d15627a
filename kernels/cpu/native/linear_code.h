/* Lossless code of bfloat16 weights in 12 bits.
 *
 * The low byte of a weight (the exponent's last bit and the fraction) is almost random. The high byte (the sign and the rest of the exponent)
 * takes few values: 16 values, chosen for each panel, cover all but about 8 of 100,000 normally distributed weights. A number of 4 bits encodes
 * each of these 16 values. A step with any other value (about one step in a hundred) is "apart": its high bytes are stored uncoded, outside the
 * panels.
 *
 *     panel   | step 0: 64 bytes of numbers, 128 low bytes | step 1: .. | ...                 192 bytes per step instead of 256
 *     apart   | step 17: 128 high bytes | step 203: .. | ...
 *
 * The 128 weights of a step are four vectors v of 32 elements e. Their order is such that vectors result from interleaving low and high bytes, 8
 * at a time, which is one instruction for 16, 32 or 64 bytes:
 *
 *     place(v, e) = v / 2 * 64 + e / 8 * 16 + v % 2 * 8 + e % 8
 *
 * Places i and 64 + i share a byte of numbers; the first one is in its lower half.
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
    const uint8_t *tables; /* [panels][TABLE_BYTES]: the high byte for each number */
    const int64_t *first;  /* [panels]: index of a panel's first entry in `apart` and `high` */
    const int32_t *apart;  /* a panel's uncoded steps, in order, then -1 */
    const uint8_t *high;   /* [..][STEP_WEIGHTS]: their high bytes, 64-byte aligned */
};

/* Position of a thread in a panel. */
struct reader {
    const uint8_t *now, *table;
    const int32_t *apart; /* the next uncoded step */
    const uint8_t *high;  /* its high bytes */
    int32_t step;
    const int8_t *zeros;  /* of 4-bit weights, the group's zero points (linear_groups.h); NULL: coded weights */
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
