// combine: y_t = sum over k of gate_tk * row(t, k), in float32, in the order of the choices, rounded once.
// Rows are found only through row_TK, so a row without a pair is never read.

#include "../numbers.h"
#include "../threads.h"

#include <vector>

namespace {

float total(Vec v) {
    float lane[W];
    std::memcpy(lane, &v, sizeof(v));
    for (int64_t half = W / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

constexpr int64_t SHARE = 16;             // tokens
constexpr int64_t STEP = 4 * W;           // columns that are summed together
constexpr int64_t CACHED = 1 << 19;       // rows of more bytes than this are fetched ahead

struct Problem {
    const void* y_RD;
    int64_t stride, kind;  // strides are in numbers; y_TD, gate_TK and the gradients have no gaps
    const float* gate_TK;
    const int64_t* row_TK;
    int64_t T, K, R, D, threads;
    void* y_TD;
    // backward
    const int64_t* pair_R;
    const void* dy_TD;
    int64_t dy_stride;
    void* dy_RD;      // may be null
    float* dgate_TK;  // may be null
};

// a token's choices that have a row, in order
template <typename In>
struct Choices {
    std::vector<const In*> row;
    std::vector<float> gate;
    int64_t n = 0;
    explicit Choices(int64_t K) : row(K), gate(K) {}
    // false if row_TK has an index outside the rows
    bool take(const Problem& s, int64_t t) {
        n = 0;
        bool right = true;
        for (int64_t p = t * s.K; p < (t + 1) * s.K; p++) {
            const int64_t r = s.row_TK[p];
            right &= r < s.R;
            if (r < 0 || r >= s.R) continue;
            row[n] = static_cast<const In*>(s.y_RD) + r * s.stride;
            gate[n++] = s.gate_TK[p];
        }
        return right;
    }
};

template <Kind kind>
int combine(const Problem& s) {
    using N = Numbers<kind>;
    using In = typename N::In;
    const bool ahead = s.R * s.D * int64_t(sizeof(In)) > CACHED;
    std::atomic<int> wrong{0};
    shared_out(s.T, fair_share(s.T, SHARE, s.threads), s.threads, [&](int64_t begin, int64_t end) {
        Choices<In> chosen(s.K), next(s.K);
        if (begin < end && !next.take(s, begin)) wrong = 1;
        for (int64_t t = begin; t < end; t++) {
            std::swap(chosen, next);
            next.n = 0;
            if (t + 1 < end && !next.take(s, t + 1)) wrong = 1;
            const int64_t fetched = ahead ? next.n : 0;
            In* to = static_cast<In*>(s.y_TD) + t * s.D;
            int64_t d = 0;
            for (; d + STEP <= s.D; d += STEP) {
                Vec a = zero(), b = zero(), c = zero(), e = zero();
                // rows are anywhere in memory, so the processor cannot prefetch them itself
                for (int64_t i = 0; i < fetched; i++)
                    for (int64_t byte = 0; byte < STEP * int64_t(sizeof(In)); byte += 64)
                        __builtin_prefetch(reinterpret_cast<const char*>(next.row[i] + d) + byte);
                for (int64_t i = 0; i < chosen.n; i++) {
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
                for (int64_t i = 0; i < chosen.n; i++) {
                    const In* p = chosen.row[i] + d;
                    sum = fma(same(chosen.gate[i]), left >= W ? N::get(p) : get_some<kind>(p, left), sum);
                }
                left >= W ? N::put(to + d, sum) : put_some<kind>(to + d, sum, left);
            }
        }
    });
    return wrong;
}

// items: first the pairs, then the rows that hold none
template <Kind kind>
int backward(const Problem& s) {
    using N = Numbers<kind>;
    using In = typename N::In;
    auto* dy_RD = static_cast<In*>(s.dy_RD);
    const int64_t P = s.T * s.K;
    std::atomic<int> wrong{0};
    shared_out(P + (dy_RD ? s.R : 0), fair_share(P, SHARE, s.threads), s.threads, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < std::min(end, P); p++) {
            const int64_t r = s.row_TK[p];
            if (r >= s.R) wrong = 1;
            if (r < 0 || r >= s.R) {
                if (s.dgate_TK) s.dgate_TK[p] = 0;
                continue;
            }
            const In* dy_D = static_cast<const In*>(s.dy_TD) + p / s.K * s.dy_stride;
            const In* y_D = static_cast<const In*>(s.y_RD) + r * s.stride;
            const Vec gate = same(s.gate_TK[p]);
            Vec sum[2] = {zero(), zero()};
            for (int64_t d = 0; d < s.D; d += W) {
                const int64_t left = s.D - d;
                const Vec dy = left >= W ? N::get(dy_D + d) : get_some<kind>(dy_D + d, left);
                if (s.dgate_TK) {
                    const Vec y = left >= W ? N::get(y_D + d) : get_some<kind>(y_D + d, left);
                    sum[d / W % 2] = fma(dy, y, sum[d / W % 2]);
                }
                if (!dy_RD) continue;
                In* to = dy_RD + r * s.D + d;
                const Vec scaled = fma(gate, dy, zero());
                left >= W ? N::put(to, scaled) : put_some<kind>(to, scaled, left);
            }
            if (s.dgate_TK) s.dgate_TK[p] = total(fma(same(1.0f), sum[0], sum[1]));
        }
        for (int64_t r = std::max(begin, P) - P; r < end - P; r++)
            if (s.pair_R[r] < 0) std::memset(static_cast<void*>(dy_RD + r * s.D), 0, s.D * sizeof(In));
    });
    return wrong;
}

}  // namespace

// Returns 0, or 1 if row_TK has an index outside the rows; then the result must not be used.
extern "C" int mrb_combine(const Problem* s) {
    return (s->kind == FLOAT32 ? combine<FLOAT32> : s->kind == BFLOAT16 ? combine<BFLOAT16> : combine<FLOAT16>)(*s);
}

// dy_RD[row(t, k)] = gate_tk * dy_t, dgate_tk = <dy_t, row(t, k)>. Returns as mrb_combine.
extern "C" int mrb_combine_backward(const Problem* s) {
    return (s->kind == FLOAT32 ? backward<FLOAT32> : s->kind == BFLOAT16 ? backward<BFLOAT16> : backward<FLOAT16>)(*s);
}
