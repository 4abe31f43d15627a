/* Recurrent layers with AVX2 and fused multiply-add. */
#include "recurrence.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx2,fma,f16c")))
#define NAME(function) quire_##function##_avx2

#include "simd_avx2.h"

#include "recurrence_tile.h"
#endif
