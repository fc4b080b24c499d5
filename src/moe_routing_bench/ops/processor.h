// The vector instructions of the target processor: x86 or ARM.
#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#ifdef MRB_PRETENDED_TILES  // level amx_pretended
#include "pretended_tiles.h"
#endif

// orders streaming stores before later stores of this thread; ARM does not use streaming stores here
static inline void after_streaming() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}
