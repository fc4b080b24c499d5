// dispatch: copy each token to its rows, token by token, so that a token is read from memory once.
// Backward: the sum of a token's rows, in float32, in the order of its choices, rounded once.

#include <immintrin.h>
#include <sys/mman.h>

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
void store(uint16_t* p, Vec v, Kind kind) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v, kind));
}
#else
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
void store(uint16_t* p, Vec v, Kind kind) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v, kind));
}
#endif

// one type of number in memory; W of them are read and written at any address
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

// the last n < W numbers of a row, filled up with zeros; memory past the row is not touched
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

// Fresh memory costs a fault a page: with pages of 2 MiB a 512th of them. Advice only, so failure is no error.
void ask_for_huge_pages(void* start, int64_t bytes) {
    if (bytes < (int64_t(4) << 20)) return;
    const uintptr_t page = 4096, first = (uintptr_t(start) + page - 1) / page * page;
    const uintptr_t past = (uintptr_t(start) + bytes) / page * page;
    madvise(reinterpret_cast<void*>(first), past - first, MADV_HUGEPAGE);
}

// past the caches: the line is not read before it is written. `to` must be aligned to 64 bytes, bytes a multiple.
void stream_copy(char* to, const char* from, int64_t bytes) {
#ifdef __AVX512F__
    for (int64_t i = 0; i < bytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#else
    for (int64_t i = 0; i < bytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#endif
}

template <Kind kind>
int sum_rows(const void* rows, int64_t stride, const int64_t* row_TK, int64_t T, int64_t K, int64_t R, int64_t D,
             int64_t threads, void* sums) {
    using N = Numbers<kind>;
    const auto* g_RD = static_cast<const typename N::In*>(rows);
    auto* dx_TD = static_cast<typename N::In*>(sums);
    int wrong = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 16) reduction(| : wrong)
    for (int64_t t = 0; t < T; t++) {
        const int64_t* row_K = row_TK + t * K;
        for (int64_t k = 0; k < K; k++) wrong |= row_K[k] >= R;
        if (wrong) continue;
        for (int64_t d = 0; d < D; d += W) {
            Vec sum = zero();
            for (int64_t k = 0; k < K; k++) {
                if (row_K[k] < 0) continue;
                const auto* p = g_RD + row_K[k] * stride + d;
                sum = fma(same(1.0f), d + W <= D ? N::get(p) : get_some<kind>(p, D - d), sum);
            }
            auto* to = dx_TD + t * D + d;
            d + W <= D ? N::put(to, sum) : put_some<kind>(to, sum, D - d);
        }
    }
    return wrong;
}

}  // namespace

// Strides and widths in bytes; x_RD has no gaps. Returns 0, or 1 if row_TK points past the rows: then what was
// written is not to be used.
extern "C" int mrb_dispatch(const char* x_TD, int64_t stride, int64_t width, const int64_t* row_TK, int64_t T,
                            int64_t K, const int64_t* pair_R, int64_t R, int64_t threads, int64_t stream,
                            char* x_RD) {
    ask_for_huge_pages(x_RD, R * width);
    stream = stream && width % 64 == 0 && uintptr_t(x_RD) % 64 == 0;
    int wrong = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : wrong)
    {
#pragma omp for schedule(dynamic, 16) nowait
        for (int64_t t = 0; t < T; t++) {
            for (int64_t k = 0; k < K; k++) {
                const int64_t r = row_TK[t * K + k];
                if (r >= R) wrong |= 1;
                if (r < 0 || r >= R) continue;
                if (stream)
                    stream_copy(x_RD + r * width, x_TD + t * stride, width);
                else
                    std::memcpy(x_RD + r * width, x_TD + t * stride, width);
            }
        }
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < R; r++)
            if (pair_R[r] < 0) std::memset(x_RD + r * width, 0, width);
        // streamed lines are not ordered with what this thread tells others afterwards
        if (stream) _mm_sfence();
    }
    return wrong;
}

// dx_TD[t] = sum over k of rows[row_TK[t, k]]; the stride is in numbers. Returns as mrb_dispatch.
extern "C" int mrb_sum_rows(const void* rows, int64_t stride, int64_t kind, const int64_t* row_TK, int64_t T,
                            int64_t K, int64_t R, int64_t D, int64_t threads, void* dx_TD) {
    const auto sum = kind == FLOAT32    ? sum_rows<FLOAT32>
                     : kind == BFLOAT16 ? sum_rows<BFLOAT16>
                                        : sum_rows<FLOAT16>;
    return sum(rows, stride, row_TK, T, K, R, D, threads, dx_TD);
}
