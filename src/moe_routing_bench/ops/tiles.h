// Shared by the C++ kernels of several operations: vectors, packed weights, engines that multiply rows by a panel.
//
// Weights are packed into panels of 32 columns that are read front to back. A panel of a gated first matrix holds 16
// gate columns and their 16 up columns, so the activation has both halves at the same time.
#pragma once
#include "processor.h"

#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2)));

enum { PANEL = 32, HALF = 16 };  // columns
static const int64_t CACHE_BYTES = [] {  // L2, for rows or weights that are used again soon
  const int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE);  // 0 if unknown
  return found > 0 ? found : 1 << 20;
}();

static inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
// a row of a workspace: whole tiles plus one line, so that rows do not all use one set of the cache
static inline int64_t row_stride(int64_t n, int64_t size) { return up_to(n, PANEL) + 64 / size; }

// ---- numbers

static inline f32x16 all(float v) { return v - f32x16{}; }
#ifdef __AVX512F__  // one instruction each; gcc 12 makes five of __builtin_convertvector
static inline u32x16 wide(u16x16 v) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)v); }
static inline u16x16 narrow(u32x16 v) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)v); }
#else
static inline u32x16 wide(u16x16 v) { return __builtin_convertvector(v, u32x16); }
static inline u16x16 narrow(u32x16 v) { return __builtin_convertvector(v, u16x16); }
#endif
static inline f32x16 load(const float* p) { return *(const f32x16*)p; }
static inline f32x16 load(const uint16_t* p) { return (f32x16)(wide(*(const u16x16*)p) << 16); }
static inline void store(float* p, f32x16 v) { *(f32x16*)p = v; }
static inline void store(uint16_t* p, f32x16 v) {  // to nearest, ties to even; NaN stays NaN
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  *(u16x16*)p = narrow(v == v ? rounded : quiet);
}
static inline float one(const float* p) { return *p; }
static inline float one(const uint16_t* p) {
  uint32_t bits = (uint32_t)*p << 16;
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

// ---- packed weights: expert, panel, then depth
// float32: [depth][32 columns]. bfloat16: [depth / 32][2 halves][16 pairs of depth][16 columns][2], AMX's tiles.

static inline int64_t packed_depth(int64_t depth) { return up_to(depth, PANEL); }
static inline int64_t panels(int64_t columns, bool gated) {
  return gated ? up_to(columns / 2, PANEL) / HALF : up_to(columns, PANEL) / PANEL;
}
template <class B> static inline int64_t place(int64_t k, int64_t half) {
  return sizeof(B) != 2 ? k * PANEL + half * HALF : k / 32 * 1024 + half * 512 + k % 32 / 2 * 32 + k % 2;
}

// Transposes 16 vectors by exchanging halves, quarters, eighths, sixteenths. The compiler must know which words are
// exchanged: for masks computed in a loop gcc 12 uses memory and vpermt2d.
template <int s> static inline void exchange(u32x16 (&v)[16]) {
#define LOW(j) ((j) & s ? 16 + (j) - s : (j))  // of two vectors laid end to end
#define HIGH(j) ((j) & s ? 16 + (j) : (j) + s)
#define FOUR(f, j) f(j), f(j + 1), f(j + 2), f(j + 3)
  const u32x16 low = {FOUR(LOW, 0), FOUR(LOW, 4), FOUR(LOW, 8), FOUR(LOW, 12)};
  const u32x16 high = {FOUR(HIGH, 0), FOUR(HIGH, 4), FOUR(HIGH, 8), FOUR(HIGH, 12)};
#undef LOW
#undef HIGH
#undef FOUR
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    if (!(i & s)) {
      const u32x16 a = v[i], b = v[i | s];
      v[i] = __builtin_shuffle(a, b, low);
      v[i | s] = __builtin_shuffle(a, b, high);
    }
}
static inline void transpose(u32x16 (&v)[16]) { exchange<1>(v), exchange<2>(v), exchange<4>(v), exchange<8>(v); }

// 16 columns, 32 of depth from k0 on; source element (k, n) is at from[k * sk + n * sn]
template <class B>
static void pack_block(B* dst, const B* from, int64_t sk, int64_t sn, int64_t depth, int64_t columns, int64_t half,
                       int64_t k0) {
  const int64_t step = sizeof(B) == 2 ? 2 : 1;
  const bool deep = k0 + 32 <= depth;
  if (deep && sn == 1 && columns == HALF) {
    for (int64_t k = k0; k < k0 + 32; k += step) {
      u32x16* to = (u32x16*)(dst + place<B>(k, half));
      const B* at = from + k * sk;
      if (sizeof(B) == 4) *to = *(const u32x16*)at;
      else *to = wide(*(const u16x16*)at) | (wide(*(const u16x16*)(at + sk)) << 16);
    }
  } else if (deep && sk == 1) {
    for (int64_t k = k0; k < k0 + 32; k += 16 * step) {  // in words of 32 bits, a pair of bfloat16 is one
      u32x16 v[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) {
        v[j] = j < columns ? *(const u32x16*)(from + k + j * sn) : u32x16{};
        __builtin_prefetch(from + k + j * sn + 1024 / sizeof(B), 0, 2);  // the processor cannot follow 16 streams
      }
      transpose(v);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) *(u32x16*)(dst + place<B>(k + i * step, half)) = v[i];
    }
  } else {
    for (int64_t k = k0; k < k0 + 32; k++)
      for (int64_t j = 0; j < HALF; j++)
        dst[place<B>(k, half) + j * step] = k < depth && j < columns ? from[k * sk + j * sn] : B(0);
  }
}

// packs panels begin..end of one expert, in the memory order of the source; `later`: depth of what is packed next
template <class B>
static void pack_strip(B* dst, const B* src, int64_t sk, int64_t sn, int64_t depth, int64_t columns, int64_t begin,
                       int64_t end, bool gated, int64_t later = 0) {
  const int64_t F = gated ? columns / 2 : columns, wide = end - begin, blocks = packed_depth(depth) / 32;
  auto column = [&](int64_t panel, int64_t half) { return gated ? panel * HALF : panel * PANEL + half * HALF; };
  auto source = [&](int64_t panel, int64_t half) { return src + (column(panel, half) + (gated && half ? F : 0)) * sn; };
  for (int64_t i = 0; i < wide * blocks; i++) {
    const int64_t panel = begin + (sn == 1 ? i % wide : i / blocks), k0 = (sn == 1 ? i / wide : i % blocks) * 32;
    for (int64_t half = 0; half < 2; half++) {
      const B* from = source(panel, half);
      if (sn == 1)  // rows are far apart: prefetch those of the next block
        for (int64_t k = k0 + 32; k < std::min(k0 + 64, depth + later); k++) __builtin_prefetch(from + k * sk, 0, 3);
      const int64_t here = std::clamp<int64_t>(F - column(panel, half), 0, HALF);
      pack_block(dst + (panel - begin) * blocks * 32 * PANEL, from, sk, sn, depth, here, half, k0);
    }
  }
}

// ---- engines: c = a (rows x depth) times one panel

// Weights to prefetch into L2. If they are used by one block of rows: the next ones in the stream. If several blocks use
// them: a share of what is needed next.
struct Ahead {
  const char* at;
  int64_t each;  // bytes, for every 1024 weights used
  template <class B> static Ahead in(const B* b, int64_t bytes = 1024 * sizeof(B), int64_t distance = 8192) {
    return {(const char*)b + distance, bytes};
  }
  template <class B> static Ahead share(const B* next, int64_t blocks, int64_t bytes = 1024 * sizeof(B)) {
    return {(const char*)next, next && blocks ? up_to(bytes / blocks, 64) : 0};
  }
  inline void fetch(int64_t parts = 1) {  // one of these parts, because many prefetches at once would stall later loads
    for (int64_t i = 0; i < each / parts; i += 64) __builtin_prefetch(at + i, 0, 2);
    at += each / parts;
  }
};

#ifdef __AVX512F__
typedef f32x16 Lanes;
typedef u32x16 Words;
#elif defined __AVX2__
typedef float Lanes __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(32), aligned(4)));
#else  // NEON
typedef float Lanes __attribute__((vector_size(16), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(16), aligned(4)));
#endif

// One number in all lanes, loaded once and kept in a register; else gcc loads it again for every product.
static inline Lanes same(const float* p) {
  Lanes v = *p - Lanes{};
#ifdef __AVX512F__
  asm("" : "+v"(v));
#elif defined __AVX2__
  asm("" : "+x"(v));
#else
  asm("" : "+w"(v));
#endif
  return v;
}
// Prefetches weights from L2 into L1 a little before they are used, because products must not wait for them.
static inline void soon(const void* p) { __builtin_prefetch(p, 0, 3); }

template <class B_> struct Vector {  // any float weights, float32 rows
  typedef float A;
  typedef B_ B;
  enum { WIDE = sizeof(Lanes) / 4, STEP = WIDE == 16 ? 11 : 6 };
  // terms of one running sum; a sum of such sums is more precise than one long sum: at 256 of depth float32 has 1.6 times
  // the error of torch's dot products, and had 3.1 times with chains of 256, which bfloat16 results do not show
  enum { CHAIN = sizeof(B) == 4 ? 64 : 256 };
  // columns for M rows at once: as many sums as fit in registers besides weights and a number of a row
  static constexpr int columns(int M) { return WIDE == 16 || M <= 2 ? PANEL : HALF; }

  template <int M, int N> static inline void add(Lanes (&s)[M][N], const float* a, int64_t lda, const Lanes (&v)[N]) {
#pragma GCC unroll 16
    for (int r = 0; r < M; r++) {
      const Lanes x = same(a + r * lda);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) s[r][n] += x * v[n];
    }
  }
  // weights of an even k or of the next k, which for bfloat16 is the other half of the same words
  static inline Lanes weights(const float* b, int n, bool odd) {
    b += odd * PANEL + n * WIDE;
    if (n * WIDE % HALF == 0) soon(b + 16 * PANEL);
    return *(const Lanes*)b;
  }
  static inline Lanes weights(const uint16_t* b, int n, bool odd) {
    b += n * WIDE / HALF * 512 + n * WIDE % HALF * 2;
    if (n * WIDE % HALF == 0 && !odd) soon(b + 32 * PANEL);
    const Words both = *(const Words*)b;
    return (Lanes)(odd ? both & 0xffff0000u : both << 16);
  }
  template <int M>
  __attribute__((noinline)) static void block(const float* a, int64_t lda, const B* b, int64_t depth, float* c, Ahead& ahead) {
    enum { COLUMNS = columns(M), PARTS = PANEL / COLUMNS, N = COLUMNS / WIDE };
    for (int64_t k0 = 0; k0 < depth; k0 += CHAIN)
      for (int64_t part = 0; part < PARTS; part++) {
        Lanes s[M][N] = {};
        for (int64_t k1 = k0; k1 < std::min(k0 + CHAIN, depth); k1 += 32) {
          const B* at = b + place<B>(k1, part);
          for (int64_t k = k1; k < k1 + 32; k += 2, at += place<B>(2, 0)) {
            ahead.fetch(16 * PARTS);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
              asm("" : "+r"(at));  // words of the even k are read again; kept, they would displace sums from registers
              Lanes v[N];
#pragma GCC unroll 8
              for (int n = 0; n < N; n++) v[n] = weights(at, n, odd);
              add(s, a + k + odd, lda, v);
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < M; r++)
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) {
            Lanes* to = (Lanes*)(c + r * PANEL + part * COLUMNS + n * WIDE);
            *to = k0 == 0 ? s[r][n] : *to + s[r][n];
          }
      }
  }
  template <int M>
  static void choose(int rows, const float* a, int64_t lda, const B* b, int64_t depth, float* c, Ahead& ahead) {
    if (rows == M) return block<M>(a, lda, b, depth, c, ahead);
    if constexpr (M > 1) choose<M - 1>(rows, a, lda, b, depth, c, ahead);
  }
  template <class Other>
  static void times(const float* a, int64_t lda, int rows, const B* b, int64_t depth, float* c, Ahead& ahead, Other&,
                    const void* = nullptr) {
    choose<STEP>(rows, a, lda, b, depth, c, ahead);
  }
  static void begin() {}
  static void end() {}
};

#ifdef __AMX_BF16__
struct Amx {  // bfloat16 weights and rows, 16 x 16 tiles with float32 sums
  typedef uint16_t A;
  typedef uint16_t B;
  enum { STEP = 32 };
  static int& configured() {  // what the tiles of this thread are set to; 0: nothing
    static thread_local int now;
    return now;
  }
  // deep: bytes of depth in a tile; integers have a rest of 32
  static void configure(int rows0, int rows1, int deep = 64) {
    const int wanted = deep * 1024 + rows0 * 32 + rows1;
    if (configured() == wanted) return;
    struct { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } t = {};
    t.palette = 1;
    for (int i = 0; i < 8; i++) t.bytes[i] = 64, t.rows[i] = 16;  // 6, 7: weights
    t.rows[0] = t.rows[1] = t.rows[4] = rows0;                    // 0, 1: sums of the upper rows; 4: the rows
    t.rows[2] = t.rows[3] = t.rows[5] = rows1 ? rows1 : 16;       // 2, 3: of the lower; 5
    t.bytes[4] = t.bytes[5] = deep;
    t.rows[6] = t.rows[7] = deep / 4;
    asm volatile("" : : "r"(&t) : "memory");  // gcc 12 thinks that only the first 8 bytes are read
    _tile_loadconfig(&t);
    configured() = wanted;
  }
  static void begin() { configure(16, 16); }
  static void end() {
    _tile_release();
    configured() = 0;
  }
  // `other` is work for the vector units, which are idle during tile instructions; called once for every 32 of depth
  template <class Other>
  static void times(const uint16_t* a, int64_t lda, int rows, const uint16_t* b, int64_t depth, float* c, Ahead& ahead,
                    Other& other, const void* = nullptr) {
    const uint16_t* lower = a + 16 * lda;
    configure(std::min(rows, 16), std::max(rows - 16, 0));
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < depth; k += 32, b += 1024) {
        ahead.fetch();
        _tile_loadd(4, a + k, lda * 2);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + k, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        other();
      }
      _tile_stored(2, c + 16 * PANEL, PANEL * 4);
      _tile_stored(3, c + 16 * PANEL + HALF, PANEL * 4);
    } else {
      for (int64_t k = 0; k < depth; k += 32, b += 1024) {
        ahead.fetch();
        _tile_loadd(4, a + k, lda * 2);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        other();
      }
    }
    _tile_stored(0, c, PANEL * 4);
    _tile_stored(1, c + HALF, PANEL * 4);
  }
};
#endif

#ifdef __AMX_BF16__
typedef Amx Bfloat16;
#else
typedef Vector<uint16_t> Bfloat16;
#endif
typedef Vector<float> Float32;

// ---- memory kept between calls, one for each calling thread; only this thread writes to it

struct Workspace {
  char* memory = nullptr;
  size_t size = 0;
  char* get(size_t wanted) {
    if (wanted > size) {
      release();
      size = up_to(wanted, 2 << 20);
      memory = (char*)aligned_alloc(2 << 20, size);
      if (memory) madvise(memory, size, MADV_HUGEPAGE);
      else size = 0;
    }
    return memory;
  }
  void release() { free(memory), memory = nullptr, size = 0; }
  ~Workspace() { release(); }
};

// rows in blocks of nearly equal size: 12 rows are 6 + 6, not 11 + 1; AMX needs whole tiles instead. most: 0 for STEP
template <class Engine> static inline int64_t block_rows(int64_t m, int64_t most = 0) {
  const int64_t step = most ? std::min<int64_t>(most, Engine::STEP) : (int64_t)Engine::STEP, blocks = (m + step - 1) / step;
  return (int)Engine::STEP == 32 ? step : (m + blocks - 1) / blocks;
}
