// Numbers in memory as vectors of float32 and back, in float32, bfloat16 and float16: for kernels that move and sum rows.
#pragma once
#include "processor.h"

#include <cstdint>
#include <cstring>

namespace {

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

#ifdef __AVX512F__
constexpr int64_t W = 16;
using Vec = __m512;
Vec zero() { return _mm512_setzero_ps(); }
Vec same(float a) { return _mm512_set1_ps(a); }
Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
Vec load(const float* p) { return _mm512_loadu_ps(p); }
Vec load(const uint16_t* p, Kind kind) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if (kind == FLOAT16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
__m256i narrow(Vec v, Kind kind) {
    if (kind == FLOAT16) return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // to the nearest, of two equally near the even one; what is not a number stays so
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
float sum_of(Vec v) { return _mm512_reduce_add_ps(v); }
float max_of(Vec v) { return _mm512_reduce_max_ps(v); }
void store(uint16_t* p, Vec v, Kind kind) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v, kind));
}
#elif defined __AVX2__
constexpr int64_t W = 8;
using Vec = __m256;
Vec zero() { return _mm256_setzero_ps(); }
Vec same(float a) { return _mm256_set1_ps(a); }
Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
Vec load(const float* p) { return _mm256_loadu_ps(p); }
Vec load(const uint16_t* p, Kind kind) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if (kind == FLOAT16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
__m128i narrow(Vec v, Kind kind) {
    if (kind == FLOAT16) return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // to the nearest, of two equally near the even one; what is not a number stays so
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i wrong = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    up = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), wrong), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}
void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
template <typename Join>
float joined(Vec v, Join join) {
    __m128 half = join(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = join(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(join(half, _mm_movehdup_ps(half)));
}
float sum_of(Vec v) { return joined(v, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }); }
float max_of(Vec v) { return joined(v, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }); }
void store(uint16_t* p, Vec v, Kind kind) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v, kind));
}
#else  // NEON
constexpr int64_t W = 4;
using Vec = float32x4_t;
Vec zero() { return vdupq_n_f32(0); }
Vec same(float a) { return vdupq_n_f32(a); }
Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
Vec load(const float* p) { return vld1q_f32(p); }
Vec load(const uint16_t* p, Kind kind) {
    const uint16x4_t bits = vld1_u16(p);
    if (kind == FLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
    return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}
uint16x4_t narrow(Vec v, Kind kind) {
    if (kind == FLOAT16) return vreinterpret_u16_f16(vcvt_f16_f32(v));
    // to the nearest, of two equally near the even one; what is not a number stays so
    const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), up, vdupq_n_u32(0x7fc00000)), 16);
}
void store(float* p, Vec v) { vst1q_f32(p, v); }
float sum_of(Vec v) { return vaddvq_f32(v); }
float max_of(Vec v) { return vmaxvq_f32(v); }
void store(uint16_t* p, Vec v, Kind kind) { vst1_u16(p, narrow(v, kind)); }
#endif

// one type of number in memory; W numbers are read and written at any address
template <Kind kind>
struct Numbers {
    using In = uint16_t;
    static Vec get(const In* p) { return load(p, kind); }
    static void put(In* p, Vec v) { store(p, v, kind); }
};
template <>
struct Numbers<FLOAT32> {
    using In = float;
    static Vec get(const In* p) { return load(p); }
    static void put(In* p, Vec v) { store(p, v); }
};

// the last n < W numbers of a row, then zeros; memory after the row is not accessed
template <Kind kind>
Vec get_some(const typename Numbers<kind>::In* p, int64_t n) {
    typename Numbers<kind>::In whole[W] = {};
    std::memcpy(whole, p, n * sizeof(*p));
    return Numbers<kind>::get(whole);
}
template <Kind kind>
void put_some(typename Numbers<kind>::In* p, Vec v, int64_t n) {
    typename Numbers<kind>::In whole[W];
    Numbers<kind>::put(whole, v);
    std::memcpy(p, whole, n * sizeof(*p));
}

}  // namespace
