// dispatch: copy each token to its rows, token by token, so that a token is read from memory once.
// Backward: the sum of a token's rows, in float32, in the order of its choices, rounded once.

#include "../numbers.h"

namespace {

// past the caches: the line is not read before it is written. `to` must be aligned to 64 bytes, bytes a multiple.
void stream_copy(char* to, const char* from, int64_t bytes) {
#ifdef __AVX512F__
    for (int64_t i = 0; i < bytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined __AVX2__
    for (int64_t i = 0; i < bytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
    std::memcpy(to, from, bytes);
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
        if (stream) after_streaming();
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
