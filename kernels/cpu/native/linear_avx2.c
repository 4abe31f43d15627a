/* The packed GEMM with AVX2 and fused multiply-add, in float32. */
#include "linear.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx2,fma,f16c")))
#define LINEAR_WORKER quire_linear_avx2
#define DOT_BF16 0
#define BLOCK_ROWS 6
#define PAIR_ROWS 5
#define WIDE_ROWS 24
#define STREAM_ROWS 2
#define MAX_VECTORS 4
#define VECTORS_OF(rows) ((rows) < 2 ? 4 : (rows) < 3 ? 2 : 1)
#define AHEAD_LEVEL 3
/* For one row the 64 columns are one tile, which reads its weights front to back: hardware prefetchers recognise this. */
#define FOLLOWS_CACHE 0
#define AHEAD_FROM 2

#include "simd_avx2.h"

#include "linear_tile.h"
#endif
