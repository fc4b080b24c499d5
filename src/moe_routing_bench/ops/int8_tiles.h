// Rows of 8 bits times weights of 8 and 4 bits on AMX: tiles of 16 rows, 16 columns and 64 of depth, sums of integers.
//
// The panels are those of int8_rows.h: four of depth of one column are adjacent and form a word of a tile of weights, so
// half of a panel is a tile with 128 bytes from row to row. The sums are the same integers, and scales and offsets are
// applied in the same order, so results have the same bits as the code for vectors.
#pragma once
#include "int8_rows.h"

#ifdef __AMX_INT8__
template <int CODE> struct Int8Tiles {
  typedef int8_t A;
  typedef uint8_t B;
  typedef Int8Rows<CODE> Vectors;
  typedef typename Vectors::Bits Bits;
  // Vectors compute fewer rows: two tiles of weights are 32 lines to load, which takes as long as two rows there, and
  // the sums of each group go through memory. This was counted, not timed.
  enum { FEWEST = 8 };
  enum { STEP = 32, WIDE = Vectors::WIDE, N = Vectors::N };
  enum { CHUNK = 256 };  // of depth: nibbles become bytes in 8 KB, which fit in L1

  static const uint8_t* bytes(const uint8_t* b, int64_t depth, const Coding& coding, uint8_t* room) {
    if (CODE != NIBBLE) return b;
    const Bits table = Vectors::four(coding.table), low = Vectors::same(0x0f0f0f0f);
    auto put = [](uint8_t* to, Bits v) { memcpy(to, &v, sizeof v); };
    for (int64_t k = 0; k < depth; k += 8, b += PANEL * 4, room += 2 * PANEL * 4)
      for (int n = 0; n < N; n++) {
        const Bits codes = Vectors::read(b + n * WIDE * 4);
        put(room + n * WIDE * 4, Vectors::look_up(table, Vectors::both(codes, low)));
        put(room + (PANEL + n * WIDE) * 4, Vectors::look_up(table, Vectors::both(Vectors::upper(codes), low)));
      }
    room -= depth * PANEL;
    asm volatile("" : : "r"(room) : "memory");  // gcc 12 thinks that nothing reads what a tile loads
    return room;
  }

  template <class Other>
  static void multiply(const int8_t* a, int64_t lda, bool both, const uint8_t* w, int64_t depth, int deep, Ahead& ahead,
                       Other& other) {
    const int8_t* lower = a + 16 * lda;
    for (int64_t k = 0; k < depth; k += deep, w += deep * PANEL) {
      for (int i = 0; i < deep; i += 32) ahead.fetch();
      _tile_loadd(4, a + k, lda);
      _tile_loadd(6, w, PANEL * 4);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, w + HALF * 4, PANEL * 4);
      _tile_dpbsud(1, 4, 7);
      if (both) {
        _tile_loadd(5, lower + k, lda);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
      other();
    }
  }

  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  static void keep(int32_t* sums, bool both) {
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + HALF, PANEL * 4);
    if (!both) return;
    _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
    _tile_stored(3, sums + 16 * PANEL + HALF, PANEL * 4);
  }
  static void take_up(const int32_t* sums, bool both) {
    _tile_loadd(0, sums, PANEL * 4);
    _tile_loadd(1, sums + HALF, PANEL * 4);
    if (!both) return;
    _tile_loadd(2, sums + 16 * PANEL, PANEL * 4);
    _tile_loadd(3, sums + 16 * PANEL + HALF, PANEL * 4);
  }

  template <class Other>
  static void times(const int8_t* a, int64_t lda, int rows, const uint8_t* b, int64_t depth, float* c, Ahead& ahead,
                    Other& other, const Coding* coding) {
    if (rows < FEWEST) return Vectors::times(a, lda, rows, b, depth, c, ahead, other, coding);
    const bool both = rows > 16;
    uint8_t room[CODE == NIBBLE ? CHUNK * PANEL : 1] __attribute__((aligned(64)));
    int32_t sums[STEP * PANEL] __attribute__((aligned(64)));
    for (int64_t k = 0, g = 0; k < depth; g++) {
      const bool first = k == 0;
      const int64_t end = coding->group < depth - k ? k + coding->group : depth;
      Lanes scale[N], offset[N] = {};
      b = Coded<CODE>::read_scales(b, *coding, scale, offset);
      auto part = [&](int64_t until, int deep) {  // of the group; a tile holds so many of depth
        for (int64_t step; k < until; k += step, b += step * PANEL / (CODE == NIBBLE ? 2 : 1)) {
          step = std::min<int64_t>(CHUNK, until - k);
          multiply(a + k, lda, both, bytes(b, step, *coding, room), step, deep, ahead, other);
        }
        keep(sums, both);
      };
      // A row's scale is directly after its depth, so a rest of 32 must not be read as 64. A new configuration sets all
      // tiles to zero.
      const int64_t whole = (end - k) / 64 * 64;
      if (whole) {
        Amx::configure(std::min(rows, 16), std::max(rows - 16, 0));
        zero();
        part(k + whole, 64);
      }
      if (k < end) {
        Amx::configure(std::min(rows, 16), std::max(rows - 16, 0), 32);
        if (whole) take_up(sums, both);
        else zero();
        part(end, 32);
      }
      for (int r = 0; r < rows; r++) {
        const int32_t off = Vectors::taken_off(a + r * lda, depth, g);
        for (int n = 0; n < N; n++) {
          const Bits sum = Vectors::read((const uint8_t*)(sums + r * PANEL + n * WIDE));
          Lanes* to = (Lanes*)(c + r * PANEL + n * WIDE);
          *to = Vectors::scaled(coding->offsets ? sum : Vectors::add(sum, Vectors::same(off)), scale[n], *to, first);
          if (coding->offsets) *to = Vectors::fused(offset[n], (float)off - Lanes{}, *to);
        }
      }
    }
    for (int r = 0; r < rows; r++) {
      float scale;
      memcpy(&scale, a + r * lda + depth, 4);
      for (int n = 0; n < N; n++) *(Lanes*)(c + r * PANEL + n * WIDE) *= scale * coding->unit;
    }
  }
  static void begin() { Amx::begin(); }
  static void end() { Amx::end(); }
};
template <int CODE> using RowsOf8Bits = Int8Tiles<CODE>;
#else
template <int CODE> using RowsOf8Bits = Int8Rows<CODE>;
#endif
