// AMX without AMX: the tile instructions that we use, computed in plain C++. This is for tests, and slow.
//
// Each thread has eight tiles of 16 rows of 64 bytes. As on the processor, an instruction reads and writes only the
// configured rows and bytes, and sets the rest of the tile it writes to zero. A fault of the processor ends the process
// with a sentence. Intel's manual, volume 2, describes the instructions (LDTILECFG, TILELOADD, TDPBF16PS, ...).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace pretended {

enum { TILES = 8, ROWS = 16, BYTES = 64 };

struct Tiles {
  bool configured;
  int rows[TILES], bytes[TILES];
  alignas(64) uint8_t data[TILES][ROWS][BYTES];
};
static thread_local Tiles tiles;

static inline void must(bool right, const char* instruction, const char* what) {
  if (right) return;
  fprintf(stderr, "pretended tiles: %s: %s\n", instruction, what);
  abort();
}

static inline void must_exist(int i, const char* instruction) {
  must(tiles.configured, instruction, "no tile is configured");
  must(0 <= i && i < TILES, instruction, "there are tiles 0 to 7");
  must(tiles.rows[i] > 0, instruction, "this tile is not configured");
}

static inline void release() { memset((void*)&tiles, 0, sizeof tiles); }

static inline void load_config(const void* from) {  // 64 bytes; all tiles become zero
  uint8_t config[64];
  memcpy(config, from, 64);
  release();
  if (config[0] == 0) return;
  must(config[0] == 1, "ldtilecfg", "the only palette is 1");
  for (int i = 1; i < 16; i++) must(config[i] == 0, "ldtilecfg", "bytes 1 to 15 are zero: no row to start from");
  for (int i = 0; i < 16; i++) {
    uint16_t bytes;
    memcpy(&bytes, config + 16 + 2 * i, 2);
    const int rows = config[48 + i];
    must(i < TILES || (bytes == 0 && rows == 0), "ldtilecfg", "there are tiles 0 to 7");
    must(bytes <= BYTES && rows <= ROWS, "ldtilecfg", "a tile has at most 16 rows of 64 bytes");
    must((bytes == 0) == (rows == 0), "ldtilecfg", "a tile has rows and bytes, or neither");
    if (i < TILES) tiles.rows[i] = rows, tiles.bytes[i] = bytes;
  }
  tiles.configured = true;
}

static inline void zero(int i) {
  must_exist(i, "tilezero");
  memset(tiles.data[i], 0, sizeof tiles.data[i]);
}

static inline void load(int i, const void* from, int64_t stride) {
  must_exist(i, "tileloadd");
  zero(i);
  for (int r = 0; r < tiles.rows[i]; r++) memcpy(tiles.data[i][r], (const char*)from + r * stride, tiles.bytes[i]);
}

static inline void store(int i, void* to, int64_t stride) {
  must_exist(i, "tilestored");
  for (int r = 0; r < tiles.rows[i]; r++) memcpy((char*)to + r * stride, tiles.data[i][r], tiles.bytes[i]);
}

// sum: m x n, a: m x k, b: k x n words of 32 bits
static inline void must_fit(int sum, int a, int b, const char* instruction) {
  for (int i : {sum, a, b}) {
    must_exist(i, instruction);
    must(tiles.bytes[i] % 4 == 0, instruction, "a row is whole words");
  }
  must(sum != a && a != b && sum != b, instruction, "three different tiles");
  must(tiles.rows[sum] == tiles.rows[a], instruction, "the rows of the sums are not those of the first factor");
  must(tiles.bytes[a] / 4 == tiles.rows[b], instruction, "the first factor is not as deep as the second");
  must(tiles.bytes[sum] == tiles.bytes[b], instruction, "the columns of the sums are not those of the second factor");
}

static inline void finish(int i) {  // sets everything that is not configured to zero
  for (int r = 0; r < ROWS; r++) {
    const int kept = r < tiles.rows[i] ? tiles.bytes[i] : 0;
    memset(tiles.data[i][r] + kept, 0, BYTES - kept);
  }
}

static inline void dpbsud(int sum, int a, int b) {  // signed bytes times unsigned ones; sums wrap
  must_fit(sum, a, b, "tdpbsud");
  for (int m = 0; m < tiles.rows[sum]; m++) {
    uint32_t s[ROWS];
    memcpy(s, tiles.data[sum][m], BYTES);
    for (int k = 0; k < tiles.rows[b]; k++)
      for (int n = 0; n < tiles.bytes[sum] / 4; n++)
        for (int i = 0; i < 4; i++)
          s[n] += (uint32_t)((int8_t)tiles.data[a][m][4 * k + i] * (int)tiles.data[b][k][4 * n + i]);
    memcpy(tiles.data[sum][m], s, BYTES);
  }
  finish(sum);
}

// even and odd places of depth have separate sums, which are added first
static __attribute__((noinline)) void add_products_of_bfloat16(int sum, int a, int b) {
  auto number = [](const uint8_t* at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    const uint32_t wide = (uint32_t)bits << 16;
    float v;
    memcpy(&v, &wide, 4);
    return v;
  };
  for (int m = 0; m < tiles.rows[sum]; m++) {
    float s[ROWS], even[ROWS] = {}, odd[ROWS] = {};
    memcpy(s, tiles.data[sum][m], BYTES);
    for (int k = 0; k < tiles.rows[b]; k++)
      for (int n = 0; n < tiles.bytes[sum] / 4; n++) {
        even[n] += number(tiles.data[a][m] + 4 * k) * number(tiles.data[b][k] + 4 * n);
        odd[n] += number(tiles.data[a][m] + 4 * k + 2) * number(tiles.data[b][k] + 4 * n + 2);
      }
    for (int n = 0; n < tiles.bytes[sum] / 4; n++) s[n] += even[n] + odd[n];
    memcpy(tiles.data[sum][m], s, BYTES);
  }
}

static inline void dpbf16ps(int sum, int a, int b) {
  must_fit(sum, a, b, "tdpbf16ps");
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // nearest even, no exceptions; subnormal numbers are zeros, read or written
  add_products_of_bfloat16(sum, a, b);
  _mm_setcsr(before);
  finish(sum);
}

}  // namespace pretended

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig pretended::load_config
#define _tile_release pretended::release
#define _tile_zero pretended::zero
#define _tile_loadd pretended::load
#define _tile_stored pretended::store
#define _tile_dpbsud pretended::dpbsud
#define _tile_dpbf16ps pretended::dpbf16ps
