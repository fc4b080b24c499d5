// dispatch: copy each token to its rows, token by token, so that a token is read from memory once.
// Backward: the sum of a token's rows, in float32, in the order of its choices, rounded once.

#include "../numbers.h"
#include "../threads.h"

namespace {

// streaming stores: a line is not read before it is written. `to` is aligned to 64 bytes, and bytes is a multiple of 64.
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

constexpr int64_t SHARE = 16;  // tokens

struct Copies {
    const char* x_TD;
    int64_t stride, width;  // in bytes; x_RD has no gaps
    const int64_t* row_TK;
    int64_t T, K;
    const int64_t* pair_R;
    int64_t R, threads, stream;
    char* x_RD;
};

struct Sums {
    const void* g_RD;
    int64_t stride, kind;  // the stride is in numbers
    const int64_t* row_TK;
    int64_t T, K, R, D, threads;
    void* dx_TD;
};

template <Kind kind>
int sum_rows(const Sums& s) {
    using N = Numbers<kind>;
    const auto* g_RD = static_cast<const typename N::In*>(s.g_RD);
    auto* dx_TD = static_cast<typename N::In*>(s.dx_TD);
    std::atomic<int> wrong{0};
    shared_out(s.T, fair_share(s.T, SHARE, s.threads), s.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t* row_K = s.row_TK + t * s.K;
            if (std::any_of(row_K, row_K + s.K, [&](int64_t r) { return r >= s.R; })) {
                wrong = 1;
                continue;
            }
            for (int64_t d = 0; d < s.D; d += W) {
                Vec sum = zero();
                for (int64_t k = 0; k < s.K; k++) {
                    if (row_K[k] < 0) continue;
                    const auto* p = g_RD + row_K[k] * s.stride + d;
                    sum = fma(same(1.0f), d + W <= s.D ? N::get(p) : get_some<kind>(p, s.D - d), sum);
                }
                auto* to = dx_TD + t * s.D + d;
                d + W <= s.D ? N::put(to, sum) : put_some<kind>(to, sum, s.D - d);
            }
        }
    });
    return wrong;
}

}  // namespace

// Returns 0, or 1 if row_TK has an index outside the rows; then the result must not be used.
extern "C" int mrb_dispatch(const Copies* copies) {
    const Copies c = *copies;
    const bool stream = c.stream && c.width % 64 == 0 && uintptr_t(c.x_RD) % 64 == 0;
    std::atomic<int> wrong{0};
    // whoever takes one token of T also takes one T-th of all rows, to clear those that hold none
    const int64_t n = std::max<int64_t>(1, c.T);
    shared_out(n, fair_share(n, SHARE, c.threads), c.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < std::min(end, c.T); t++) {
            const char* x_D = c.x_TD + t * c.stride;
            for (int64_t k = 0; k < c.K; k++) {
                const int64_t r = c.row_TK[t * c.K + k];
                if (r >= c.R) wrong = 1;
                if (r < 0 || r >= c.R) continue;
                if (stream)
                    stream_copy(c.x_RD + r * c.width, x_D, c.width);
                else
                    std::memcpy(c.x_RD + r * c.width, x_D, c.width);
            }
        }
        for (int64_t r = begin * c.R / n; r < end * c.R / n; r++)
            if (c.pair_R[r] < 0) std::memset(c.x_RD + r * c.width, 0, c.width);
        if (stream) after_streaming();
    });
    return wrong;
}

// dx_TD[t] = sum over k of rows[row_TK[t, k]]. Returns as mrb_dispatch.
extern "C" int mrb_sum_rows(const Sums* s) {
    return (s->kind == FLOAT32 ? sum_rows<FLOAT32> : s->kind == BFLOAT16 ? sum_rows<BFLOAT16> : sum_rows<FLOAT16>)(*s);
}
