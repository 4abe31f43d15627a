/* Recurrent layers on any processor. */
#include "recurrence.h"

#define TARGETED
#define FN static inline __attribute__((always_inline))
#define NAME(function) quire_##function##_generic

#include "simd_generic.h"

#include "recurrence_tile.h"
