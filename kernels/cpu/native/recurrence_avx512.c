/* Recurrent layers with AVX-512. */
#include "recurrence.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define NAME(function) quire_##function##_avx512

#include "simd_avx512.h"

#include "recurrence_tile.h"
#endif
