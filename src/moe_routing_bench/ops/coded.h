// Weights of 8 and 4 bits: codes become numbers in registers, just before they are multiplied.
//
// A panel has 32 columns, as in tiles.h, and is read front to back. The codes of each group of depth come after the
// group's 32 scales, in the narrowest type for all scales of the format, and its 32 offsets in float32 if it has them.
// Codes of a byte: [depth][32 columns]. Nibbles: [depth / 2][32 columns], the even depth in the lower half. For rows of
// int8 (int8_rows.h) four of depth are adjacent: [depth / 4][32 columns][4], int8 codes plus 128; nibbles:
// [depth / 8][32 columns][4], the first four of eight in the lower halves.
#pragma once
#include "tiles.h"

enum Code { INT8, E4M3, NIBBLE };          // mirrored in coded.py
enum Scale { FLOAT32, FLOAT16, EXPONENT };  // also mirrored; EXPONENT: a byte e for 2^(e - 127)

struct Coding {  // also mirrored
  int64_t code, group, offsets, scale;  // group: a multiple of 32; offsets: 0 or 1
  float numbers[16];                    // the number of each nibble
  int64_t int8_rows, zero;              // int8_rows: 0 or 1; zero: how much bytes of weights exceed their numbers
  float unit;                           // of these numbers
  uint8_t table[16];                    // nibbles as such bytes
  int64_t scale_bytes() const { return PANEL * (scale == FLOAT32 ? 4 : scale == FLOAT16 ? 2 : 1); }
};

static inline uint16_t float16(float v) {
#ifdef __aarch64__
  const __fp16 rounded = v;
  uint16_t bits;
  memcpy(&bits, &rounded, 2);
  return bits;
#else
  return _cvtss_sh(v, 0);
#endif
}

// Packs 32 columns of one expert: code is columns x depth, one per byte; scale and offset are columns x groups. If order
// is negative there is no column.
static inline void pack_panel(uint8_t* to, const uint8_t* code, const float* scale, const float* offset,
                              const int64_t* order, int64_t K, int64_t groups, const Coding& coding) {
  const int64_t depth = packed_depth(K), step = coding.code == NIBBLE ? 2 : 1;
  for (int64_t k0 = 0, g = 0; k0 < depth; k0 += coding.group, g++) {
    float some[2][PANEL] = {};
    for (int c = 0; c < PANEL; c++)
      if (order[c] >= 0) {
        some[0][c] = scale[order[c] * groups + g];
        if (coding.offsets) some[1][c] = offset[order[c] * groups + g];
      }
    for (int c = 0; c < PANEL; c++) {
      uint32_t bits;
      memcpy(&bits, &some[0][c], 4);
      if (coding.scale == EXPONENT) to[c] = bits >> 23;  // the least, 2^-127, has no exponent in float32
      else if (coding.scale == FLOAT16) ((uint16_t*)to)[c] = float16(some[0][c]);
      else ((float*)to)[c] = some[0][c];
    }
    to += coding.scale_bytes();
    if (coding.offsets) memcpy(to, some[1], sizeof some[1]), to += sizeof some[1];
    const int64_t side = coding.int8_rows ? 4 : 1;  // of depth, of one column, side by side
    for (int64_t k = k0; k < std::min(k0 + coding.group, depth); k += step * side)
      for (int c = 0; c < PANEL; c++)
        for (int64_t i = k; i < k + side; i++) {
          auto at = [&](int64_t k) { return order[c] < 0 || k >= K ? 0 : code[order[c] * K + k]; };
          *to++ = step == 2 ? at(i) | at(i + side) << 4 : coding.int8_rows ? at(i) ^ 0x80 : at(i);
        }
  }
}

// codes E x columns x depth, a byte each, to panels; order: the column at each place of the panels, -1: padding
extern "C" void mrb_pack_coded(uint8_t* dst, const uint8_t* code, const float* scale, const float* offset,
                               const int64_t* order, int64_t E, int64_t columns, int64_t depth, int64_t groups,
                               int64_t panels, int64_t bytes, const Coding* coding, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < E * panels; i++) {
    const int64_t e = i / panels, of = e * columns * groups;
    pack_panel(dst + i * bytes, code + e * columns * depth, scale + of, offset ? offset + of : nullptr,
               order + i % panels * PANEL, depth, groups, *coding);
  }
}

template <int CODE> struct Coded {
  typedef float A;
  typedef uint8_t B;
  enum { WIDE = sizeof(Lanes) / 4, N = PANEL / WIDE, STEP = WIDE == 16 ? 11 : 3, CHAIN = 256 };

#ifdef __AVX512F__
  typedef __m512i Bits;
  struct Table {
    __m512 all;
    Table(const float* numbers) : all(_mm512_loadu_ps(numbers)) {}
    Lanes operator[](Bits code) const { return (Lanes)_mm512_permutexvar_ps(code, all); }  // looks at 4 bits alone
  };
  static Bits bits(const uint8_t* b) {
    const __m128i v = _mm_loadu_si128((const __m128i*)b);
    return CODE == INT8 ? _mm512_cvtepi8_epi32(v) : _mm512_cvtepu8_epi32(v);
  }
  static Lanes number(const uint8_t* b) {
    if (CODE == INT8) return (Lanes)_mm512_cvtepi32_ps(bits(b));
    // e4m3 is read as float16, whose exponents are larger by 8: 256 times too small, which the scales correct
    const __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)b));
    return (Lanes)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16((short)0xbfff)));
  }
  static Bits upper(Bits code) { return _mm512_srli_epi32(code, 4); }
  static Lanes half(const uint16_t* b) { return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)b)); }
  static Words wide(const uint8_t* b) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)b)); }
#elif defined __AVX2__
  typedef __m256i Bits;
  struct Table {
    __m256 low, high;
    Table(const float* numbers) : low(_mm256_loadu_ps(numbers)), high(_mm256_loadu_ps(numbers + 8)) {}
    Lanes operator[](Bits code) const {
      const __m256 eight = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // bit 3 as the sign
      return (Lanes)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), eight);
    }
  };
  static Bits bits(const uint8_t* b) {
    const __m128i v = _mm_loadl_epi64((const __m128i*)b);
    return CODE == INT8 ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v);
  }
  static Lanes number(const uint8_t* b) {
    if (CODE == INT8) return (Lanes)_mm256_cvtepi32_ps(bits(b));
    const __m128i v = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)b));
    return (Lanes)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(v, 7), _mm_set1_epi16((short)0xbfff)));
  }
  static Bits upper(Bits code) { return _mm256_srli_epi32(code, 4); }
  static Lanes half(const uint16_t* b) { return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)b)); }
  static Words wide(const uint8_t* b) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)b)); }
#else  // NEON
  typedef Words Bits;
  struct Table {
    uint8x16x4_t bytes;
    Table(const float* numbers) : bytes(vld1q_u8_x4((const uint8_t*)numbers)) {}
    Lanes operator[](Bits code) const {
      const Bits places = (code & 15) * 0x04040404 + 0x03020100;  // of the four bytes of a number
      return (Lanes)vqtbl4q_u8(bytes, (uint8x16_t)places);
    }
  };
  static uint8x8_t four(const uint8_t* b) {
    uint32_t v;
    memcpy(&v, b, 4);
    return vreinterpret_u8_u32(vdup_n_u32(v));
  }
  static int16x4_t extended(const uint8_t* b) { return vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four(b)))); }
  static Words wide(const uint8_t* b) { return (Words)vmovl_u16(vget_low_u16(vmovl_u8(four(b)))); }
  static Bits bits(const uint8_t* b) { return wide(b); }
  static Lanes number(const uint8_t* b) {
    if (CODE == INT8) return (Lanes)vcvtq_f32_s32(vmovl_s16(extended(b)));
    const int16x4_t v = vand_s16(vshl_n_s16(extended(b), 7), vdup_n_s16((short)0xbfff));
    return (Lanes)vcvt_f32_f16(vreinterpret_f16_s16(v));
  }
  static Bits upper(Bits code) { return code >> 4; }
  static Lanes half(const uint16_t* b) { return (Lanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(b))); }
#endif
  static Lanes power(const uint8_t* b) {
    const Words e = wide(b);
    return (Lanes)(e == 0 ? 0x400000u + Words{} : e << 23);
  }

  // reads the scales and offsets before a group; returns where its codes begin
  static const uint8_t* read_scales(const uint8_t* b, const Coding& coding, Lanes (&scale)[N], Lanes (&offset)[N]) {
    for (int n = 0; n < N; n++)
      scale[n] = coding.scale == FLOAT32   ? *(const Lanes*)((const float*)b + n * WIDE)
                 : coding.scale == FLOAT16 ? half((const uint16_t*)b + n * WIDE)
                                           : power(b + n * WIDE);
    b += coding.scale_bytes();
    if (!coding.offsets) return b;
    for (int n = 0; n < N; n++) offset[n] = *(const Lanes*)((const float*)b + n * WIDE);
    return b + PANEL * 4;
  }

  template <int M>
  __attribute__((noinline)) static void block(const float* a, int64_t lda, const uint8_t* b, int64_t depth, float* c,
                                              Ahead& ahead, const Coding& coding) {
    const Table table(coding.numbers);
    Lanes scale[N], offset[N] = {};
    int64_t left = 0;  // of the group
    auto add = [&](Lanes (&s)[M][N], const Lanes (&v)[N], int64_t k) {
#pragma GCC unroll 16
      for (int r = 0; r < M; r++) {
        const Lanes x = a[r * lda + k] - Lanes{};
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) s[r][n] += x * v[n];
      }
    };
    for (int64_t k0 = 0; k0 < depth; k0 += CHAIN) {
      Lanes s[M][N] = {};
      for (int64_t k1 = k0; k1 < std::min(k0 + CHAIN, depth); k1 += 32) {
        if (left == 0) b = read_scales(b, coding, scale, offset), left = coding.group;
        left -= 32;
        for (int64_t k = k1; k < k1 + 32; k += 2) {
          if (k % 8 == 0) ahead.fetch(4);
          Lanes even[N], odd[N];
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) {
            if (CODE == NIBBLE) {
              const Bits code = bits(b + n * WIDE);
              even[n] = table[code], odd[n] = table[upper(code)];
            } else {
              even[n] = number(b + n * WIDE), odd[n] = number(b + PANEL + n * WIDE);
            }
            even[n] = even[n] * scale[n] + offset[n];
            odd[n] = odd[n] * scale[n] + offset[n];
          }
          b += CODE == NIBBLE ? PANEL : 2 * PANEL;
          add(s, even, k);
          add(s, odd, k + 1);
        }
      }
      for (int r = 0; r < M; r++)
        for (int n = 0; n < N; n++) {
          Lanes* to = (Lanes*)(c + r * PANEL + n * WIDE);
          *to = k0 == 0 ? s[r][n] : *to + s[r][n];
        }
    }
  }
  template <int M>
  static void choose(int rows, const float* a, int64_t lda, const uint8_t* b, int64_t depth, float* c, Ahead& ahead,
                     const Coding& coding) {
    if (rows == M) return block<M>(a, lda, b, depth, c, ahead, coding);
    if constexpr (M > 1) choose<M - 1>(rows, a, lda, b, depth, c, ahead, coding);
  }
  template <class Other>
  static void times(const float* a, int64_t lda, int rows, const uint8_t* b, int64_t depth, float* c, Ahead& ahead, Other&,
                    const Coding* coding) {
    choose<STEP>(rows, a, lda, b, depth, c, ahead, *coding);
  }
  static void begin() {}
  static void end() {}
};
