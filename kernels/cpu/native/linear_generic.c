/* The packed GEMM on any processor, in float32. */
#include "linear.h"

#define TARGETED
#define FN static inline __attribute__((always_inline))
#define LINEAR_WORKER quire_linear_generic
#define DOT_BF16 0
#define BLOCK_ROWS 2
#define PAIR_ROWS 2
#define WIDE_ROWS 0
#define STREAM_ROWS 0
#define MAX_VECTORS 1
#define VECTORS_OF(rows) 1
#define AHEAD_LEVEL 3
#define FOLLOWS_CACHE 0
#define AHEAD_FROM 1

#include "simd_generic.h"

#include "linear_tile.h"
