/* Attention with AVX2 and fused multiply-add, matrix products in float32. */
#include "attention.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx2,fma,f16c")))
#define WORKER quire_attention_avx2
#define TAKES_HEADS quire_takes_heads_avx2
#define EXP2 quire_exp2_avx2
#define DOT_BF16 0
#define BLOCK_ROWS 6
#define MATRIX_REGISTERS 0
#define AHEAD_LEVEL 2
#define MAX_VECTORS 1
#define PAGE_VECTORS(rows) ((rows) < 3 ? 2 : 1)

#include "simd_avx2.h"

#include "attention_tile.h"
#endif
