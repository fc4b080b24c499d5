// The vector instructions of the processor that is compiled for: x86 or ARM.
#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#ifdef MRB_PRETENDED_TILES  // level amx_pretended
#include "pretended_tiles.h"
#endif

// lines streamed past the caches are not ordered with what this thread lets others know afterwards; ARM streams none
static inline void after_streaming() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}
