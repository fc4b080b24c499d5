// combine: y_t = sum over k of gate_tk * row(t, k), in float32, in the order of the choices, rounded once.
// Rows are found through row_TK alone, so a row without a pair is never read.

#include "../numbers.h"

#include <vector>

namespace {

float total(Vec v) {
    float lane[W];
    std::memcpy(lane, &v, sizeof(v));
    for (int64_t half = W / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

struct Sizes {
    int64_t T, K, R, D, threads;
};

// a token's choices that have a row, in order
template <typename In>
struct Choices {
    std::vector<const In*> row;
    std::vector<float> gate;
};

template <Kind kind>
int combine(const void* rows, int64_t stride, const float* gate_TK, const int64_t* row_TK, Sizes s, void* sums) {
    using N = Numbers<kind>;
    using In = typename N::In;
    const auto* y_RD = static_cast<const In*>(rows);
    auto* y_TD = static_cast<In*>(sums);
    const int64_t step = 4 * W;
    int wrong = 0;
#pragma omp parallel num_threads(s.threads) if (s.threads > 1) reduction(| : wrong)
    {
        Choices<In> chosen{std::vector<const In*>(s.K), std::vector<float>(s.K)};
#pragma omp for schedule(dynamic, 16) nowait
        for (int64_t t = 0; t < s.T; t++) {
            int64_t n = 0;
            for (int64_t k = 0; k < s.K; k++) {
                const int64_t r = row_TK[t * s.K + k];
                wrong |= r >= s.R;
                if (r < 0 || r >= s.R) continue;
                chosen.row[n] = y_RD + r * stride;
                chosen.gate[n++] = gate_TK[t * s.K + k];
            }
            In* to = y_TD + t * s.D;
            int64_t d = 0;
            for (; d + step <= s.D; d += step) {
                Vec a = zero(), b = zero(), c = zero(), e = zero();
                for (int64_t i = 0; i < n; i++) {
                    const Vec gate = same(chosen.gate[i]);
                    const In* p = chosen.row[i] + d;
                    a = fma(gate, N::get(p), a);
                    b = fma(gate, N::get(p + W), b);
                    c = fma(gate, N::get(p + 2 * W), c);
                    e = fma(gate, N::get(p + 3 * W), e);
                }
                N::put(to + d, a);
                N::put(to + d + W, b);
                N::put(to + d + 2 * W, c);
                N::put(to + d + 3 * W, e);
            }
            for (; d < s.D; d += W) {
                const int64_t left = s.D - d;
                Vec sum = zero();
                for (int64_t i = 0; i < n; i++) {
                    const In* p = chosen.row[i] + d;
                    sum = fma(same(chosen.gate[i]), left >= W ? N::get(p) : get_some<kind>(p, left), sum);
                }
                left >= W ? N::put(to + d, sum) : put_some<kind>(to + d, sum, left);
            }
        }
    }
    return wrong;
}

template <Kind kind>
int backward(const void* rows, int64_t stride, const float* gate_TK, const int64_t* row_TK, const int64_t* pair_R,
             const void* upstream, int64_t upstream_stride, Sizes s, void* d_rows, float* dgate_TK) {
    using N = Numbers<kind>;
    using In = typename N::In;
    const auto* y_RD = static_cast<const In*>(rows);
    const auto* dy_TD = static_cast<const In*>(upstream);
    auto* dy_RD = static_cast<In*>(d_rows);
    int wrong = 0;
#pragma omp parallel num_threads(s.threads) if (s.threads > 1) reduction(| : wrong)
    {
#pragma omp for schedule(dynamic, 16) nowait
        for (int64_t p = 0; p < s.T * s.K; p++) {
            const int64_t r = row_TK[p];
            wrong |= r >= s.R;
            if (r < 0 || r >= s.R) {
                if (dgate_TK) dgate_TK[p] = 0;
                continue;
            }
            const In* dy_D = dy_TD + p / s.K * upstream_stride;
            const In* y_D = y_RD + r * stride;
            const Vec gate = same(gate_TK[p]);
            Vec sum[2] = {zero(), zero()};
            for (int64_t d = 0; d < s.D; d += W) {
                const int64_t left = s.D - d;
                const Vec dy = left >= W ? N::get(dy_D + d) : get_some<kind>(dy_D + d, left);
                if (dgate_TK) {
                    const Vec y = left >= W ? N::get(y_D + d) : get_some<kind>(y_D + d, left);
                    sum[d / W % 2] = fma(dy, y, sum[d / W % 2]);
                }
                if (!dy_RD) continue;
                In* to = dy_RD + r * s.D + d;
                const Vec scaled = fma(gate, dy, zero());
                left >= W ? N::put(to, scaled) : put_some<kind>(to, scaled, left);
            }
            if (dgate_TK) dgate_TK[p] = total(fma(same(1.0f), sum[0], sum[1]));
        }
        if (dy_RD) {
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < s.R; r++)
                if (pair_R[r] < 0) std::memset(static_cast<void*>(dy_RD + r * s.D), 0, s.D * sizeof(In));
        }
    }
    return wrong;
}

}  // namespace

// Strides are in numbers; y_TD, gate_TK and the gradients have no gaps. Returns 0, or 1 if row_TK points past the
// rows: then what was written is not to be used.
extern "C" int mrb_combine(const void* y_RD, int64_t stride, int64_t kind, const float* gate_TK,
                           const int64_t* row_TK, int64_t T, int64_t K, int64_t R, int64_t D, int64_t threads,
                           void* y_TD) {
    const auto run = kind == FLOAT32 ? combine<FLOAT32> : kind == BFLOAT16 ? combine<BFLOAT16> : combine<FLOAT16>;
    return run(y_RD, stride, gate_TK, row_TK, {T, K, R, D, threads}, y_TD);
}

// dy_RD[row(t, k)] = gate_tk * dy_t, dgate_tk = <dy_t, row(t, k)>; either may be null. Returns as mrb_combine.
extern "C" int mrb_combine_backward(const void* y_RD, int64_t stride, int64_t kind, const float* gate_TK,
                                    const int64_t* row_TK, const int64_t* pair_R, const void* dy_TD,
                                    int64_t dy_stride, int64_t T, int64_t K, int64_t R, int64_t D, int64_t threads,
                                    void* dy_RD, float* dgate_TK) {
    const auto run = kind == FLOAT32 ? backward<FLOAT32> : kind == BFLOAT16 ? backward<BFLOAT16> : backward<FLOAT16>;
    return run(y_RD, stride, gate_TK, row_TK, pair_R, dy_TD, dy_stride, {T, K, R, D, threads}, dy_RD, dgate_TK);
}
