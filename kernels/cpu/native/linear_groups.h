/* Weights of 4 bits with a scale and a zero point for each group of input features.
 *
 *     w[n, k] = scale[n, g] * (number[n, k] - zero[n, g])      number, zero: 0 to 15; g = k / group size
 *
 * A step's 128 numbers are in the order of `code_place` (linear_code.h): places i and 64 + i share a byte, the first one is in its lower half.
 * So a step takes 64 bytes. The differences, -15 to 15, are exact in bfloat16. Their products with x are added in float32 for one group at a
 * time, and the sum of a group is multiplied by the group's scale before it is added to the total.
 */
#ifndef QUIRE_LINEAR_GROUPS_H
#define QUIRE_LINEAR_GROUPS_H

#include <stdint.h>

/* Mirrored in `quire/kernels/cpu/weight_panels.py`. */
struct weight_groups {
    const float *scales;  /* [panels][groups][PANEL_COLUMNS] */
    const int8_t *zeros;  /* [panels][groups][STEP_WEIGHTS], in the order of code_place */
    int64_t group_steps;  /* steps of a group: at most CHUNK, or all */
};

#endif
