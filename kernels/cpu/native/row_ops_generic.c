/* Row operations and adapters on any processor. */
#include "adapter.h"
#include "row_ops.h"

#define TARGETED
#define FN static inline __attribute__((always_inline))
#define NAME(function) quire_##function##_generic

#include "simd_generic.h"

#include "row_ops_tile.h"

#define ADAPTER_ROWS 2
#include "adapter_tile.h"
