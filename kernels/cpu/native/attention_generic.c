/* Attention on any processor, matrix products in float32. */
#include "attention.h"

#define TARGETED
#define FN static inline __attribute__((always_inline))
#define WORKER quire_attention_generic
#define TAKES_HEADS quire_takes_heads_generic
#define EXP2 quire_exp2_generic
#define DOT_BF16 0
#define BLOCK_ROWS 2
#define MATRIX_REGISTERS 0
#define AHEAD_LEVEL 2
#define MAX_VECTORS 1
#define PAGE_VECTORS(rows) 1

#include "simd_generic.h"

#include "attention_tile.h"
