// One product of pretended tiles, for tests/ops/test_pretended_tiles.py.
#include "pretended_tiles.h"

// c (tile `sum`) += a (tile 4) b (tile 6); strides in bytes; without a configuration if it is null
extern "C" void multiply(const void* config, int bfloat16, int sum, const void* a, int64_t lda, const void* b, int64_t ldb,
                         void* c, int64_t ldc) {
  if (config) _tile_loadconfig(config);
  _tile_loadd(4, a, lda);
  _tile_loadd(6, b, ldb);
  _tile_loadd(sum, c, ldc);
  if (bfloat16) _tile_dpbf16ps(sum, 4, 6);
  else _tile_dpbsud(sum, 4, 6);
  _tile_stored(sum, c, ldc);
  _tile_release();
}
