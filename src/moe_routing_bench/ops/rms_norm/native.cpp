// rms_norm: y = x / sqrt(mean(x^2) + eps) * norm. A token is read from memory once: the second reading finds it in the
// cache. Large results are streamed past the caches, which saves reading each line before it is written.

#include "../numbers.h"
#include "../threads.h"

#include <cmath>

namespace {

constexpr int64_t AHEAD = 2;  // tokens between the one that is written and the one that is fetched

struct Problem {
    const void* x_TD;
    int64_t stride, kind;
    const float* norm_D;
    double eps;
    int64_t T, D, threads, stream;
    void* y_TD;
};

// four sums hide the latency of a product; their order depends on D alone, so a token's bits do not depend on its batch
template <Kind kind>
float mean_square(const typename Numbers<kind>::In* x, int64_t D) {
    Vec sum[4] = {zero(), zero(), zero(), zero()};
    int64_t d = 0;
    for (; d + 4 * W <= D; d += 4 * W)
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; i++) {
            const Vec v = Numbers<kind>::get(x + d + i * W);
            sum[i] = fma(v, v, sum[i]);
        }
    for (; d < D; d += W) {
        const Vec v = d + W <= D ? Numbers<kind>::get(x + d) : get_some<kind>(x + d, D - d);
        sum[0] = fma(v, v, sum[0]);
    }
    return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / float(D);
}

#ifdef __AVX512F__
template <Kind kind>
void stream(typename Numbers<kind>::In* p, Vec a, Vec b) {
    if constexpr (kind == FLOAT32) {
        _mm512_stream_ps(p, a);
        _mm512_stream_ps(p + W, b);
    } else {
        const __m512i low = _mm512_castsi256_si512(narrow(a, kind));
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_inserti64x4(low, narrow(b, kind), 1));
    }
}
constexpr bool CAN_STREAM = true;
#else
template <Kind kind>
void stream(typename Numbers<kind>::In*, Vec, Vec) {}
constexpr bool CAN_STREAM = false;
#endif

template <Kind kind>
void normed(const typename Numbers<kind>::In* x, const float* norm, float factor, int64_t D, bool streams,
            int64_t ahead, typename Numbers<kind>::In* y) {
    const Vec f = same(factor);
    int64_t d = 0;
    if (CAN_STREAM && streams && reinterpret_cast<uintptr_t>(y) % 64 == 0)
        for (; d + 2 * W <= D; d += 2 * W) {
            __builtin_prefetch(x + d + ahead);
            if (kind == FLOAT32) __builtin_prefetch(x + d + W + ahead);
            stream<kind>(y + d, Numbers<kind>::get(x + d) * f * load(norm + d),
                         Numbers<kind>::get(x + d + W) * f * load(norm + d + W));
        }
    for (; d + W <= D; d += W) Numbers<kind>::put(y + d, Numbers<kind>::get(x + d) * f * load(norm + d));
    if (d < D)
        put_some<kind>(y + d, get_some<kind>(x + d, D - d) * f * get_some<FLOAT32>(norm + d, D - d), D - d);
}

template <Kind kind>
void rms_norm(const Problem& p) {
    using In = typename Numbers<kind>::In;
    const auto* x_TD = static_cast<const In*>(p.x_TD);
    auto* y_TD = static_cast<In*>(p.y_TD);
    const int64_t share = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.D));
    shared_out(p.T, share, p.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const In* x = x_TD + t * p.stride;
            const float factor = 1 / std::sqrt(mean_square<kind>(x, p.D) + float(p.eps));
            normed<kind>(x, p.norm_D, factor, p.D, p.stream, AHEAD * p.stride, y_TD + t * p.D);
        }
        if (p.stream) after_streaming();
    });
}

}  // namespace

extern "C" int mrb_rms_norm(const Problem* p) {
    if (p->kind == FLOAT32) rms_norm<FLOAT32>(*p);
    if (p->kind == BFLOAT16) rms_norm<BFLOAT16>(*p);
    if (p->kind == FLOAT16) rms_norm<FLOAT16>(*p);
    return 0;
}
