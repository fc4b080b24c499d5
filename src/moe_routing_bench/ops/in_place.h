// Rows times weights that are read in place, in either order of memory, without a packed copy: for few rows, where packing
// takes longer than multiplying. Only the weights themselves are read, and nothing needs to be aligned.
//
// The order of a sum does not depend on threads. The bits are those of packed weights, but for dot products of Vector.
#pragma once
#include "tiles.h"

enum { LANES = sizeof(Lanes) / 4 };
static const int64_t SUMS_BYTES = 1 << 18;  // of one task

struct Task {
  int64_t segment, begin, end;  // panels
};

// Tasks of `width` panels of each segment. IN_PLACE: as wide as possible with enough tasks, because long reads of memory
// are faster; NONE: no task
enum { IN_PLACE = 0, NONE = -1 };
template <class Segment, class Wide>
static std::vector<Task> cut(const std::vector<Segment>& order, int64_t panels, int64_t enough, Wide width) {
  std::vector<Task> tasks;
  for (size_t i = 0; i < order.size(); i++) {
    int64_t wide = width(order[i]);
    if (wide == IN_PLACE)
      wide = std::clamp<int64_t>(panels * order.size() / enough, 4, SUMS_BYTES / (order[i].rows * PANEL * (int64_t)sizeof(float)));
    for (int64_t begin = 0; wide > 0 && begin < panels; begin += wide)
      tasks.push_back({(int64_t)i, begin, std::min(begin + wide, panels)});
  }
  return tasks;
}

static inline Lanes lanes(const float* p) { return *(const Lanes*)p; }
static inline Lanes lanes(const uint16_t* p) {
#ifdef __AVX512F__
  return load(p);
#elif defined __AVX2__  // one instruction; gcc 12 makes several of __builtin_convertvector
  return (Lanes)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  typedef uint16_t Short __attribute__((vector_size(LANES * 2), aligned(2)));
  return (Lanes)(__builtin_convertvector(*(const Short*)p, Words) << 16);
#endif
}

static inline void four_sums(Lanes s0, Lanes s1, Lanes s2, Lanes s3, float* c) {  // of the lanes of each
#ifdef __AVX512F__
  auto fold = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  __m512 v = fold(fold(s0, s1), fold(s2, s3));  // four lanes of each, in order
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
  _mm512_mask_compressstoreu_ps(c, 0x1111, v);
#elif defined __AVX2__
  const __m256 v = _mm256_hadd_ps(_mm256_hadd_ps(s0, s1), _mm256_hadd_ps(s2, s3));
  _mm_storeu_ps(c, _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
#else
  vst1q_f32(c, vpaddq_f32(vpaddq_f32(s0, s1), vpaddq_f32(s2, s3)));
#endif
}

template <class Engine> struct InPlace {  // Engine: a Vector
  typedef typename Engine::B B;
  enum { FEW = 24, MANY = 256 };  // rows, by trial
  // contiguous columns too deep for whole panels: packing two of them leaves the cache, and one reads 64 bytes at a time
  static bool in_pieces(int64_t sn, int64_t depth) { return sn == 1 && depth * PANEL * (int64_t)sizeof(B) > CACHE_BYTES / 4; }
  // true if the bits are those of packed weights
  static bool same_bits(int64_t sn) { return sn == 1; }
  static bool reads(int64_t sk, int64_t sn, int64_t) { return sn == 1 || sk == 1; }
  static int64_t part_bytes(int64_t, int64_t) { return SUMS_BYTES; }

  // as many sums as registers hold beside weights and rows: COLUMNS or WIDE vectors of weights times ROWS rows
  enum { ROWS = LANES == 8 ? 3 : 6, COLUMNS = 4, DEEP = LANES == 8 ? 3 : 4, CHAIN = Engine::CHAIN, SUMS = 6144, WIDE = 16 * PANEL };

  // ---- columns one after the other in memory (sk == 1): a dot product for each

  template <int M>
  static inline __attribute__((always_inline)) void add(Lanes (&s)[M][COLUMNS], const float* a, int64_t lda, const B* w0, const B* w1,
                                                        const B* w2, const B* w3) {
    const Lanes v[COLUMNS] = {lanes(w0), lanes(w1), lanes(w2), lanes(w3)};
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const Lanes x = lanes(a + r * lda);
#pragma GCC unroll 8
      for (int n = 0; n < COLUMNS; n++) s[r][n] += x * v[n];
    }
  }
  template <int M>
  __attribute__((noinline)) static void dots(const float* a, int64_t lda, const B* const (&w)[COLUMNS], int64_t ahead, int64_t depth,
                                             float (&c)[ROWS][COLUMNS]) {
    Lanes s[M][COLUMNS] = {};
    const B *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
      if (k * sizeof(B) % 64 == 0) {
        __builtin_prefetch(w0 + k + ahead, 0, 2), __builtin_prefetch(w1 + k + ahead, 0, 2);
        __builtin_prefetch(w2 + k + ahead, 0, 2), __builtin_prefetch(w3 + k + ahead, 0, 2);
      }
      add<M>(s, a + k, lda, w0 + k, w1 + k, w2 + k, w3 + k);
    }
    if (k < depth) {  // rows end with zeros, weights do not
      B rest[COLUMNS][LANES] = {};
      for (int n = 0; n < COLUMNS; n++) memcpy(rest[n], w[n] + k, (depth - k) * sizeof(B));
      add<M>(s, a + k, lda, rest[0], rest[1], rest[2], rest[3]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) four_sums(s[r][0], s[r][1], s[r][2], s[r][3], c[r]);
  }
  template <int M = ROWS>
  static void choose_dots(int rows, const float* a, int64_t lda, const B* const (&w)[COLUMNS], int64_t ahead, int64_t depth,
                          float (&c)[ROWS][COLUMNS]) {
    if (rows == M) return dots<M>(a, lda, w, ahead, depth, c);
    if constexpr (M > 1) choose_dots<M - 1>(rows, a, lda, w, ahead, depth, c);
  }

  // ---- contiguous columns (sn == 1): each weight times one number of a row, added to the row's sums

  template <int M, int K>  // K of depth
  __attribute__((noinline)) static void spread(const float* a, int64_t lda, const B* w, int64_t sk, int64_t columns, float* c, int64_t ldc) {
    Lanes x[M][K];
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
      for (int k = 0; k < K; k++) x[r][k] = a[r * lda + k] - Lanes{};
    for (int64_t n = 0; n < columns; n += LANES) {
      Lanes v[K];
#pragma GCC unroll 8
      for (int k = 0; k < K; k++) v[k] = lanes(w + k * sk + n);
      if (n * sizeof(B) % 64 == 0)
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) __builtin_prefetch(w + (K + k) * sk + n, 0, 2);
#pragma GCC unroll 8
      for (int r = 0; r < M; r++) {
        Lanes s = lanes(c + r * ldc + n);
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) s += x[r][k] * v[k];
        *(Lanes*)(c + r * ldc + n) = s;
      }
    }
  }
  template <int K, int M = ROWS>
  static void choose_spread(int rows, const float* a, int64_t lda, const B* w, int64_t sk, int64_t columns, float* c, int64_t ldc) {
    if (rows == M) return spread<M, K>(a, lda, w, sk, columns, c, ldc);
    if constexpr (M > 1) choose_spread<K, M - 1>(rows, a, lda, w, sk, columns, c, ldc);
  }
  static void spread_all(int rows, const float* a, int64_t lda, const B* w, int64_t sk, int64_t deep, int64_t columns, float* c,
                         int64_t ldc) {
    const int64_t whole = columns / LANES * LANES;
    int64_t k = 0;
    for (; k + DEEP <= deep; k += DEEP) choose_spread<DEEP>(rows, a + k, lda, w + k * sk, sk, whole, c, ldc);
    for (; k < deep; k++) choose_spread<1>(rows, a + k, lda, w + k * sk, sk, whole, c, ldc);
    if (whole == columns) return;
    B rest[CHAIN][LANES];
    memset(rest, 0, sizeof rest);
    for (k = 0; k < deep; k++) memcpy(rest[k], w + k * sk + whole, (columns - whole) * sizeof(B));
    for (k = 0; k < deep; k++) choose_spread<1>(rows, a + k, lda, rest[k], LANES, LANES, c + whole, ldc);
  }

  // the same for more rows: WIDE columns, CHAIN of depth, are packed and used at once
  static void pieces(const float* a, int64_t lda, int64_t rows, const B* w, int64_t sk, int64_t depth, int64_t columns, float* c,
                     int64_t ldc, B* strip) {
    const int64_t step = block_rows<Engine>(rows);
    float sums[Engine::STEP * PANEL] __attribute__((aligned(64)));
    auto nothing = [] {};
    for (int64_t n0 = 0; n0 < columns; n0 += WIDE)
      for (int64_t k0 = 0; k0 < depth; k0 += CHAIN) {
        const int64_t wide = std::min<int64_t>(WIDE, columns - n0), deep = std::min<int64_t>(CHAIN, depth - k0);
        pack_strip(strip, w + k0 * sk + n0, sk, 1, deep, wide, 0, panels(wide, false), false, depth - k0 - deep);
        for (int64_t r = 0; r < rows; r += step)
          for (int64_t n = 0; n < wide; n += PANEL) {
            const int m = (int)std::min(step, rows - r);
            Ahead none = {nullptr, 0};
            Engine::times(a + r * lda + k0, lda, m, strip + n * packed_depth(deep), packed_depth(deep), sums, none, nothing);
            for (int i = 0; i < m; i++)
              for (int64_t j = 0; j < std::min<int64_t>(PANEL, wide - n); j += LANES) {
                Lanes* to = (Lanes*)(c + (r + i) * ldc + n0 + n + j);
                *to = k0 ? *to + lanes(sums + i * PANEL + j) : lanes(sums + i * PANEL + j);
              }
          }
      }
  }

  // c[r * ldc + n] = sum over k of a[r * lda + k] * w[k * sk + n * sn]; sk or sn is 1. c has room for whole vectors; part: rows x
  // columns, in whole vectors
  static void times(const float* a, int64_t lda, int64_t rows, const B* w, int64_t sk, int64_t sn, int64_t depth, int64_t columns,
                    float* c, int64_t ldc, bool, float* part) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, each = (rows + blocks - 1) / blocks;
    if (sn != 1) {
      for (int64_t n0 = 0; n0 < columns; n0 += COLUMNS) {
        const B* at[COLUMNS];
        for (int n = 0; n < COLUMNS; n++) at[n] = w + std::min(n0 + n, columns - 1) * sn;  // extra ones repeat the last; discarded
        for (int64_t r0 = 0; r0 < rows; r0 += each) {
          const int m = (int)std::min(each, rows - r0);
          float sums[ROWS][COLUMNS];
          choose_dots(m, a + r0 * lda, lda, at, COLUMNS * sn, depth, sums);
          for (int r = 0; r < m; r++)
            memcpy(c + (r0 + r) * ldc + n0, sums[r], std::min<int64_t>(COLUMNS, columns - n0) * sizeof(float));
        }
      }
      return;
    }
    if (rows > FEW && in_pieces(sn, depth)) return pieces(a, lda, rows, w, sk, depth, columns, c, ldc, (B*)part);
    const int64_t tile = SUMS / each / LANES * LANES;  // columns whose sums stay in the L1 cache
    for (int64_t k0 = 0; k0 < depth; k0 += CHAIN) {
      const int64_t deep = std::min<int64_t>(CHAIN, depth - k0), ld = k0 ? up_to(columns, LANES) : ldc;
      float* to = k0 ? part : c;
      for (int64_t r = 0; r < rows; r++) memset(to + r * ld, 0, up_to(columns, LANES) * sizeof(float));
      for (int64_t n = 0; n < columns; n += tile)
        for (int64_t r = 0; r < rows; r += each)
          spread_all((int)std::min(each, rows - r), a + r * lda + k0, lda, w + k0 * sk + n, sk, deep, std::min(tile, columns - n),
                     to + r * ld + n, ld);
      if (k0)
        for (int64_t r = 0; r < rows; r++)
          for (int64_t n = 0; n < columns; n += LANES) *(Lanes*)(c + r * ldc + n) += lanes(part + r * ld + n);
    }
  }
};

#ifdef __AMX_BF16__
template <> struct InPlace<Amx> {
  typedef uint16_t B;
  // by trial: packing is faster above FEW rows, and up to VECTOR rows so is Vector, whose sums have other bits
  enum { FEW = 128, MANY = FEW, VECTOR = 4, DEEP = 128, WIDE = 2048, TILE = 512 + 32, NEXT = 512 };
  static bool same_bits(int64_t) { return true; }
  static bool in_pieces(int64_t, int64_t) { return false; }
  static bool reads(int64_t sk, int64_t sn, int64_t depth) { return sn == 1 || (sk == 1 && depth % 32 == 0); }
  static int64_t part_bytes(int64_t rows, int64_t depth) {
    const int64_t pairs = DEEP / 32 * WIDE / 16 * TILE * sizeof(B), packed = up_to(rows, PANEL) * packed_depth(depth) * sizeof(B);
    return std::max({pairs + SUMS_BYTES, packed, 2 * SUMS_BYTES + VECTOR * packed_depth(depth) * (int64_t)sizeof(float)});
  }

  // columns one after the other in memory (sk == 1): they are the rows of a product with rows that are packed as columns
  static void columns_times(const B* a, int64_t lda, int64_t rows, const B* w, int64_t sn, int64_t depth, int64_t columns, float* c,
                            int64_t ldc, B* packed) {
    for (int64_t r = 0; r < rows; r += PANEL)
      pack_strip(packed + r * depth, a + r * lda, 1, lda, depth, std::min<int64_t>(PANEL, rows - r), 0, 1, false);
    for (int64_t n = 0; n < columns; n += PANEL)
      for (int64_t r = 0; r < rows; r += PANEL) {
        float sums[PANEL * PANEL] __attribute__((aligned(64)));
        const B *from = w + n * sn, *next = from + NEXT, *end = from + depth;
        auto fetch = [&] {  // the processor cannot follow so many streams
          if (r) return;
          if (next >= end && end) next += PANEL * sn - depth, end = nullptr;
#pragma GCC unroll 32
          for (int64_t j = 0; j < PANEL; j++) __builtin_prefetch(next + j * sn, 0, 2);
          next += 32;
        };
        Ahead none = {nullptr, 0};
        Amx::times(from, sn, (int)std::min<int64_t>(PANEL, columns - n), packed + r * depth, depth, sums, none, fetch);
        for (int64_t i = n; i < std::min(n + PANEL, columns); i += HALF)
          for (int64_t j = r; j < std::min(r + PANEL, rows); j += HALF) {
            u32x16 v[HALF];
#pragma GCC unroll 16
            for (int k = 0; k < HALF; k++) v[k] = *(const u32x16*)(sums + (i - n + k) * PANEL + j - r);
            transpose(v);
            for (int64_t k = 0; k < std::min<int64_t>(HALF, rows - j); k++) *(u32x16*)(c + (j + k) * ldc + i) = v[k];
          }
      }
  }

  // to[2 n + i] = from[n + i * sk], for n < columns, then zeros; count: of i, 0 to 2
  static void pair(B* to, const B* from, int64_t sk, int64_t count, int64_t columns) {
    int64_t n = 0;
    if (count == 2)
      for (; n + HALF <= columns; n += HALF) {
        if (n % PANEL == 0) __builtin_prefetch(from + 16 * sk + n, 0, 2), __builtin_prefetch(from + 17 * sk + n, 0, 2);
        *(u32x16*)(to + n / 16 * TILE) = wide(*(const u16x16*)(from + n)) | (wide(*(const u16x16*)(from + sk + n)) << 16);
      }
    for (; n < up_to(columns, PANEL); n++)
      for (int64_t i = 0; i < 2; i++) to[n / 16 * TILE + n % 16 * 2 + i] = n < columns && i < count ? from[n + i * sk] : B(0);
  }

  // contiguous columns (sn == 1): DEEP rows of w are read from front to back, because short reads from many rows are slow
  static void rows_times(const B* a, int64_t lda, int64_t rows, const B* w, int64_t sk, int64_t depth, int64_t columns, float* c,
                         int64_t ldc, B* pairs) {
    const int64_t ld = up_to(columns, PANEL) / 16 * TILE;  // not a power of 2: a tile's rows must not share a set of the cache
    float* sums = (float*)(pairs + DEEP / 32 * ld);
    for (int64_t k0 = 0; k0 < depth; k0 += DEEP) {
      const int64_t deep = std::min<int64_t>(DEEP, packed_depth(depth - k0));
      const bool first = k0 == 0, last = k0 + DEEP >= depth;
      for (int64_t k = 0; k < deep; k += 2)
        pair(pairs + k / 32 * ld + k % 32 * 16, w + (k0 + k) * sk, sk, std::clamp<int64_t>(depth - k0 - k, 0, 2), columns);
      for (int64_t n = 0; n < columns; n += PANEL) {
        for (int64_t r = 0; r < rows; r += PANEL) {
          const int64_t upper = std::min<int64_t>(rows - r, HALF), lower = std::min<int64_t>(rows - r - upper, HALF);
          float *here = sums + n * rows + r * PANEL, *below = here + upper * PANEL;
          Amx::configure((int)upper, (int)lower);
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
          if (!first) {
            _tile_loadd(0, here, 64);
            _tile_loadd(1, here + upper * HALF, 64);
          }
          if (!first && lower) {
            _tile_loadd(2, below, 64);
            _tile_loadd(3, below + lower * HALF, 64);
          }
          const B *x = a + r * lda + k0, *b = pairs + n / 16 * TILE;
          for (int64_t k = 0; k < deep; k += 32, b += ld) {
            _tile_loadd(4, x + k, lda * sizeof(B));
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!lower) continue;
            _tile_loadd(5, x + HALF * lda + k, lda * sizeof(B));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
          if (!last) {
            _tile_stored(0, here, 64);
            _tile_stored(1, here + upper * HALF, 64);
            if (!lower) continue;
            _tile_stored(2, below, 64);
            _tile_stored(3, below + lower * HALF, 64);
            continue;
          }
          float* to = c + r * ldc + n;
          const bool right = columns - n > HALF;
          _tile_stored(0, to, ldc * 4);
          if (right) _tile_stored(1, to + HALF, ldc * 4);
          if (!lower) continue;
          _tile_stored(2, to + HALF * ldc, ldc * 4);
          if (right) _tile_stored(3, to + HALF * ldc + HALF, ldc * 4);
        }
      }
    }
  }

  static void times(const B* a, int64_t lda, int64_t rows, const B* w, int64_t sk, int64_t sn, int64_t depth, int64_t columns,
                    float* c, int64_t ldc, bool steady, float* part) {
    if (!steady && rows <= VECTOR) {
      float* wide = part + 2 * SUMS_BYTES / sizeof(float);
      const int64_t ld = packed_depth(depth);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < ld; k += HALF) store(wide + r * ld + k, load(a + r * lda + k));
      return InPlace<Vector<B>>::times(wide, ld, rows, w, sk, sn, depth, columns, c, ldc, false, part);
    }
    if (sn != 1) return columns_times(a, lda, rows, w, sn, depth, columns, c, ldc, (B*)part);
    for (int64_t n = 0; n < columns; n += WIDE)
      rows_times(a, lda, rows, w + n, sk, depth, std::min<int64_t>(WIDE, columns - n), c + n, ldc, (B*)part);
  }
};
#endif

// True if an expert with this many rows is read in place. steady: only if the bits are those of packed weights; few: 0 for
// the rule of this file
template <class Engine> static bool in_place(int64_t rows, int64_t sk, int64_t sn, int64_t depth, bool steady, int64_t few = 0) {
  typedef InPlace<Engine> Here;
  const int64_t most = few ? few : Here::in_pieces(sn, depth) ? (int64_t)Here::MANY : (int64_t)Here::FEW;
  return rows <= most && Here::reads(sk, sn, depth) && (!steady || Here::same_bits(sn));
}
