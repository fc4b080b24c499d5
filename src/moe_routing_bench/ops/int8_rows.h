// Rows of 8 bits times weights of 8 and 4 bits: products of integers, summed exactly.
//
// A row is int8 codes, padded with zeros to whole tiles, then its scale, then a number for each group of the weights'
// depth. Weights are unsigned bytes, because vpdpbusd multiplies unsigned by signed bytes. A code is its number plus
// `zero`, and zero times the sum of the row's codes is subtracted at the start of each group. NEON's sdot multiplies
// only signed bytes, so there zero is subtracted from the bytes themselves.
//
//   sum over k of x_k w_k = scale_x * (scale_w * (sum of code_x * byte_w - zero * sum of code_x) + offset_w * sum of code_x)
#pragma once
#include "coded.h"

static inline int64_t row_groups(int64_t depth, const Coding& coding) {
  return (packed_depth(depth) - 1) / coding.group + 1;
}
// bytes from a row to the next; not a multiple of 512, because then all rows would use few sets of the cache
static inline int64_t int8_row_stride(int64_t depth, const Coding& coding) {
  const int64_t bytes = up_to(packed_depth(depth) + 4 + 4 * row_groups(depth, coding), 64);
  return bytes % 512 ? bytes : bytes + 64;
}

#ifdef __AVX512F__
static inline void store_codes(int8_t* to, f32x16 v, i32x16& sum) {
  const __m512i code = _mm512_cvtps_epi32((__m512)v);  // to nearest, ties to even
  sum += (i32x16)code;
  _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(code));
}
#elif defined __AVX2__
static inline void store_codes(int8_t* to, f32x16 v, i32x16& sum) {
  float numbers[HALF];
  store(numbers, v);
  for (int i = 0; i < HALF; i += 8) {
    int32_t codes[8];
    _mm256_storeu_si256((__m256i*)codes, _mm256_cvtps_epi32(_mm256_loadu_ps(numbers + i)));
    for (int j = 0; j < 8; j++) to[i + j] = (int8_t)codes[j], sum[i + j] += codes[j];
  }
}
#else  // NEON
static inline void store_codes(int8_t* to, f32x16 v, i32x16& sum) {
  float numbers[HALF];
  store(numbers, v);
  for (int i = 0; i < HALF; i++) {
    const int32_t code = vcvtns_s32_f32(numbers[i]);
    to[i] = (int8_t)code, sum[i] += code;
  }
}
#endif

// Rounds n numbers to a row: the largest becomes 127. A row with a NaN or an infinity gets the scale NaN.
template <class X> static void quantise_row(const X* from, int64_t n, int8_t* to, const Coding& coding) {
  const int64_t depth = packed_depth(n);
  auto numbers = [&](int64_t d) {
    if (d + HALF <= n) return load(from + d);
    X some[HALF] = {};
    if (d < n) memcpy(some, from + d, (n - d) * sizeof(X));
    return load(some);
  };
  u32x16 most = {};
  for (int64_t d = 0; d < n; d += HALF) {
    const u32x16 size = (u32x16)numbers(d) & 0x7fffffffu;  // as integers, NaN and infinity are the largest
    most = size > most ? size : most;
  }
  uint32_t bits = 0;
  for (int i = 0; i < HALF; i++) bits = std::max(bits, most[i]);
  float scale;
  memcpy(&scale, &bits, 4);
  scale = bits < 0x7f800000u ? scale / 127 : __builtin_nanf("");
  if (scale == 0) scale = 1;
  const float lift = scale < 0x1p-100f ? 0x1p100f : 1;  // so that 1 / scale is a number
  const f32x16 up = all(lift), inverse = all(scale == scale ? 1 / (scale * lift) : 0);
  char* tail = (char*)to + depth;
  memcpy(tail, &scale, 4);
  for (int64_t d = 0, g = 1; d < depth; g++) {
    i32x16 sum = {};
    for (const int64_t end = coding.group < depth - d ? d + coding.group : depth; d < end; d += HALF)
      store_codes(to + d, numbers(d) * up * inverse, sum);
    int32_t total = 0;
    for (int i = 0; i < HALF; i++) total += sum[i];
    total *= coding.offsets ? 1 : -(int32_t)coding.zero;  // formats with offsets have zero 0
    memcpy(tail + 4 * g, &total, 4);
  }
}

template <int CODE> struct Int8Rows {
  typedef int8_t A;
  typedef uint8_t B;
  enum { WIDE = sizeof(Lanes) / 4, N = PANEL / WIDE, STEP = WIDE == 16 ? 12 : 3 };

#ifdef __AVX512F__
  typedef __m512i Bits;
  static Bits same(int32_t v) { return _mm512_set1_epi32(v); }
  static Bits read(const uint8_t* b) { return _mm512_loadu_si512(b); }
  static Bits four(const uint8_t* b) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)b)); }
  static Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
  static Bits upper(Bits a) { return _mm512_srli_epi16(a, 4); }
  static Bits look_up(Bits table, Bits a) { return _mm512_shuffle_epi8(table, a); }
  static Lanes number(Bits a) { return (Lanes)_mm512_cvtepi32_ps(a); }
  static Bits add(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
  static Lanes fused(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
  static Bits pairs(Bits a, Bits b) { return _mm512_madd_epi16(a, b); }
  static Bits unsigned_pairs(Bits a, Bits b) { return _mm512_maddubs_epi16(a, b); }
  static Bits odd(Bits a) { return _mm512_srli_epi16(a, 8); }
  static Bits signed_odd(Bits a) { return _mm512_srai_epi16(a, 8); }
  static Bits signed_even(Bits a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
#elif defined __AVX2__
  typedef __m256i Bits;
  static Bits same(int32_t v) { return _mm256_set1_epi32(v); }
  static Bits read(const uint8_t* b) { return _mm256_loadu_si256((const __m256i*)b); }
  static Bits four(const uint8_t* b) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)b)); }
  static Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
  static Bits upper(Bits a) { return _mm256_srli_epi16(a, 4); }
  static Bits look_up(Bits table, Bits a) { return _mm256_shuffle_epi8(table, a); }
  static Lanes number(Bits a) { return (Lanes)_mm256_cvtepi32_ps(a); }
  static Bits add(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
  static Lanes fused(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
  static Bits pairs(Bits a, Bits b) { return _mm256_madd_epi16(a, b); }
  static Bits unsigned_pairs(Bits a, Bits b) { return _mm256_maddubs_epi16(a, b); }
  static Bits odd(Bits a) { return _mm256_srli_epi16(a, 8); }
  static Bits signed_odd(Bits a) { return _mm256_srai_epi16(a, 8); }
  static Bits signed_even(Bits a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
#else  // NEON
  typedef int32x4_t Bits;
  static Bits same(int32_t v) { return vdupq_n_s32(v); }
  static Bits read(const uint8_t* b) { return vreinterpretq_s32_u8(vld1q_u8(b)); }
  static Bits four(const uint8_t* b) { return read(b); }
  static Bits both(Bits a, Bits b) { return a & b; }
  static Bits upper(Bits a) { return a >> 4; }
  static Bits look_up(Bits table, Bits a) { return (Bits)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)a); }
  static Lanes number(Bits a) { return (Lanes)vcvtq_f32_s32(a); }
  static Bits add(Bits a, Bits b) { return a + b; }
  static Lanes fused(Lanes a, Lanes b, Lanes c) { return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#endif
#ifdef __aarch64__
  enum { SIGNED = 1 };  // bytes of weights, in `dot`
  static Bits less(Bits bytes, int64_t zero) { return (Bits)((uint8x16_t)bytes - vdupq_n_u8((uint8_t)zero)); }
#else
  enum { SIGNED = 0 };
  static Bits less(Bits bytes, int64_t) { return bytes; }
#endif

  // sums of four products each: weights unsigned unless SIGNED, rows signed
  static Bits dot(Bits sum, Bits w, Bits x) {
#ifdef __aarch64__
    return vdotq_s32(sum, (int8x16_t)w, (int8x16_t)x);
#elif defined __AVX512VNNI__
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));  // gcc 12 keeps sums of the builtin in memory
    return sum;
#else
    // numbers of nibbles are at most 24, so 16 bits hold a sum of two products
    if (CODE == NIBBLE) return add(sum, pairs(unsigned_pairs(w, x), same(0x00010001)));
    return add(sum, add(pairs(both(w, same(0x00ff00ff)), signed_even(x)), pairs(odd(w), signed_odd(x))));
#endif
  }
  // fused explicitly: gcc 12 fuses all a * b + c of a block of rows except one, so a row's bits depended on its place
  static Lanes scaled(Bits sum, Lanes scale, Lanes so_far, bool first) {
    return first ? number(sum) * scale : fused(number(sum), scale, so_far);
  }
  static Bits quad(const int8_t* a) {
    int32_t four;
    memcpy(&four, a, 4);
    return same(four);
  }
  static int32_t taken_off(const int8_t* row, int64_t depth, int64_t g) {
    int32_t v;
    memcpy(&v, row + depth + 4 + 4 * g, 4);
    return v;
  }

  template <int M>
  __attribute__((noinline)) static void block(const int8_t* a, int64_t lda, const uint8_t* b, int64_t depth, float* c,
                                              Ahead& ahead, const Coding& coding) {
    // A product takes 4 to 5 cycles, so with few rows and one sum each, products would wait for each other. The sums
    // are integers, so their bits do not depend on the number of chains.
    enum { CHAINS = WIDE < 16 ? 1 : M == 1 ? 4 : M <= 3 ? 2 : 1 };
    const Bits table = less(four(coding.table), coding.zero), low = same(0x0f0f0f0f);
    for (int64_t k0 = 0, g = 0; k0 < depth; g++) {
      const int64_t end = coding.group < depth - k0 ? k0 + coding.group : depth;
      Lanes scale[N], offset[N] = {};
      b = Coded<CODE>::read_scales(b, coding, scale, offset);
      Bits s[CHAINS][M][N] = {};  // in registers only if every loop over it is unrolled
#pragma GCC unroll 16
      for (int r = 0; r < M; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) s[0][r][n] = same(coding.offsets || SIGNED ? 0 : taken_off(a + r * lda, depth, g));
      for (int64_t k = k0; k < end; k += 4 * CHAINS)
#pragma GCC unroll 4
        for (int i = 0; i < CHAINS; i++) {
          const bool second = CHAINS > 1 ? i % 2 : k % 8 != 0;  // four of eight; depth begins at a multiple of 32
          if (!second) ahead.fetch(4);
          Bits w[N];
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) {
            w[n] = read(b + n * WIDE * 4);
            if (CODE == INT8) w[n] = less(w[n], coding.zero);
            if (CODE == NIBBLE) w[n] = look_up(table, both(second ? upper(w[n]) : w[n], low));
          }
          b += CODE == NIBBLE && !second ? 0 : PANEL * 4;
#pragma GCC unroll 16
          for (int r = 0; r < M; r++) {
            const Bits x = quad(a + r * lda + k + 4 * i);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) s[i][r][n] = dot(s[i][r][n], w[n], x);
          }
        }
#pragma GCC unroll 4
      for (int i = 1; i < CHAINS; i++)
#pragma GCC unroll 16
        for (int r = 0; r < M; r++)
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) s[0][r][n] = add(s[0][r][n], s[i][r][n]);
      auto to = [&](int r, int n) -> Lanes& { return *(Lanes*)(c + r * PANEL + n * WIDE); };
#pragma GCC unroll 16
      for (int r = 0; r < M; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
          to(r, n) = scaled(s[0][r][n], scale[n], to(r, n), k0 == 0);
        }
      if (coding.offsets)
        for (int r = 0; r < M; r++)
          for (int n = 0; n < N; n++) to(r, n) = fused(offset[n], (float)taken_off(a + r * lda, depth, g) - Lanes{}, to(r, n));
      k0 = end;
    }
    for (int r = 0; r < M; r++) {
      float scale;
      memcpy(&scale, a + r * lda + depth, 4);
      for (int n = 0; n < N; n++) *(Lanes*)(c + r * PANEL + n * WIDE) *= scale * coding.unit;
    }
  }
  template <int M>
  static void choose(int rows, const int8_t* a, int64_t lda, const uint8_t* b, int64_t depth, float* c, Ahead& ahead,
                     const Coding& coding) {
    if (rows == M) return block<M>(a, lda, b, depth, c, ahead, coding);
    if constexpr (M > 1) choose<M - 1>(rows, a, lda, b, depth, c, ahead, coding);
  }
  template <class Other>
  static void times(const int8_t* a, int64_t lda, int rows, const uint8_t* b, int64_t depth, float* c, Ahead& ahead, Other&,
                    const Coding* coding) {
    choose<STEP>(rows, a, lda, b, depth, c, ahead, *coding);
  }
  static void begin() {}
  static void end() {}
};
