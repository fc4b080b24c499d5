// The whole expert layer on a CPU: gather, first GEMM, activation, second GEMM, gate, sum. Plain C on raw pointers.
//
// Rows go through in groups that fit a workspace of fixed size:
//
//   gather    x rows of the group              -> a  (rows x D)
//   first     tasks (expert, columns of F)     -> h  (rows x F), largest expert first
//   round     only for rows of int8: h         -> mid, what the second product reads; else that is h
//   lower     only of experts read in place    -> o  (rows x D)
//   second    tasks (columns of D)             -> y, each over all experts of the group in order
//
// A task owns its columns on any thread, so sums have one order: the same input gives the same bits for any number of
// threads, and one busy expert keeps every thread busy. With several NUMA nodes (nodes.h) a thread takes the columns of
// its node first.
//
// Weights were packed before, or they are plain. Plain weights of an expert with few rows are read in place (in_place.h);
// others are packed into the caches, a strip at a time, just before they are used.
#include "../in_place.h"
#include "../int8_tiles.h"
#include "../nodes.h"

#include <type_traits>

enum Activation { GELU, RELU, SILU, RELU2, GEGLU, SWIGLU, SWIGLU_OAI };  // mirrored in native.py; the gated last
enum { WIDEST = 8 };  // panels of one task
static const int64_t GROUP_BYTES = 16 << 20;  // a and h of one group

static constexpr bool is_gated(int activation) { return activation >= GEGLU; }

// ---- activations

// e^x within 2 ulp: x = n ln 2 + r, a polynomial for e^r
static inline f32x16 exp(f32x16 x) {
  x = x > 88.f ? all(88.f) : x;
  x = x < -87.f ? all(-87.f) : x;
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 n = (x * 1.44269504f + magic) - magic;
  f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  f32x16 p = all(1.f / 720);
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
  return p * (f32x16)power;
}

// erf(x) = x P((x^2 - 8) / 8) for |x| <= 4, fitted at Chebyshev points, within 2e-7; +-1 beyond
static inline f32x16 erf(f32x16 x) {
  static const float P[] = {
      0.353531003f,  -0.176576167f, 0.131675005f,  -0.107713364f, 0.0902120396f,   -0.0746875331f,
      0.0598559938f, -0.0460143201f, 0.0332170017f, -0.0216625314f, 0.0139081459f, -0.0100859068f,
      0.00557736354f, -0.00107694208f, 0.000616610749f, -0.00137281511f, 0.000596425089f};
  f32x16 c = x > 4.f ? all(4.f) : x;
  c = c < -4.f ? all(-4.f) : c;
  f32x16 u = (c * c - 8.f) * 0.125f, p = all(P[16]);
  for (int i = 15; i >= 0; i--) p = p * u + P[i];
  return p * c;
}

template <int ACTIVATION> static inline f32x16 activate(f32x16 v) {
  if (ACTIVATION == RELU || ACTIVATION == RELU2) {
    v = v < 0.f ? all(0.f) : v;
    return ACTIVATION == RELU ? v : v * v;
  }
  if (ACTIVATION == SILU || ACTIVATION == SWIGLU) return v / (exp(-v) + 1.f);
  return v * 0.5f * (erf(v * 0.70710678f) + 1.f);
}

template <int ACTIVATION> static inline f32x16 activate(f32x16 gate, f32x16 up) {
  if (ACTIVATION != SWIGLU_OAI) return activate<ACTIVATION>(gate) * up;
  gate = gate > 7.f ? all(7.f) : gate;  // the numbers are experts.OAI_LIMIT and OAI_ALPHA
  up = up > 7.f ? all(7.f) : up;
  up = up < -7.f ? all(-7.f) : up;
  return gate / (exp(gate * -1.702f) + 1.f) * (up + 1.f);
}

// one row of a panel's sums to hidden values: the only code that is compiled for each activation
template <class A> using Row = void (*)(const float* sums0, const float* sums1, const f32x16 (&bias)[2], A* to);

template <int ACTIVATION, class A>
static void row_of(const float* sums0, const float* sums1, const f32x16 (&bias)[2], A* to) {
  const f32x16 v0 = load(sums0) + bias[0], v1 = load(sums1) + bias[1];
  if (is_gated(ACTIVATION)) return store(to, activate<ACTIVATION>(v0, v1));
  store(to, activate<ACTIVATION>(v0));
  store(to + HALF, activate<ACTIVATION>(v1));
}

template <class A> static Row<A> row_function(int64_t activation) {
  static const Row<A> all[] = {row_of<GELU, A>,  row_of<RELU, A>,   row_of<SILU, A>,      row_of<RELU2, A>,
                               row_of<GEGLU, A>, row_of<SWIGLU, A>, row_of<SWIGLU_OAI, A>};
  return all[activation];
}

// ---- the layer

struct Problem {  // mirrored in native.py
  const void *x, *w_in, *w_out;
  const float *b_in, *b_out, *gate;  // biases may be null
  const Coding* coding;  // of weights in 8 and 4 bits; else null
  const int64_t *pair_R, *offset_E1, *count_E;
  void* y;
  int64_t ldx, T, K, D, F, E;
  int64_t in_stride, out_stride, in_panel, out_panel;  // from an expert, from a panel to the next, in elements
  int64_t in_k, in_n, out_k, out_n;  // of plain weights: from a number of the depth, from a column to the next
  int64_t plain;  // 0: weights are packed; 1: they are not; 2: they are not, and the bits must be those of packed ones
  int64_t activation, threads, R;
  Nodes* nodes;  // null: one
  int64_t rows, strip, strip_out, prefetch, in_place, group;  // knobs of native.py; 0: the rule of this file
};

struct Segment {  // rows of one expert in one group
  int64_t expert, first, rows, at;  // first: index into pair_R; at: row of the workspace
};

static thread_local Workspace workspace;

template <class Engine, class X> struct Layer {
  typedef typename Engine::A A;
  typedef typename Engine::B B;
  static constexpr bool int8_rows = sizeof(A) == 1;
  typedef std::conditional_t<int8_rows, float, A> H;
  const Problem& p;
  const bool gated = is_gated((int)p.activation);
  const Row<H> row_of = row_function<H>(p.activation);
  const int64_t lda = stride(p.D), ldh = row_stride(p.F, sizeof(H)), ldm = stride(p.F), ldl = row_stride(p.D, 2), ldo = row_stride(p.D, 4);
  const int64_t G = gated ? 2 * p.F : p.F, Dp = packed_depth(p.D), Fp = packed_depth(p.F);
  struct Matrix {
    const B* w;
    int64_t stride, panel, k, n, depth, columns;
    bool gated;
  };
  const Matrix in = {(const B*)p.w_in, p.in_stride, p.in_panel, p.in_k, p.in_n, p.D, G, gated};
  const Matrix out = {(const B*)p.w_out, p.out_stride, p.out_panel, p.out_k, p.out_n, p.F, p.D, false};
  const bool plain = p.plain;
  struct Own {  // memory of one thread, for plain weights: a packed strip; sums; what InPlace needs beside them
    B* strip;
    float *c, *part;
  };
  A *a = nullptr, *mid = nullptr;
  H* h = nullptr;
  float* o = nullptr;
  uint16_t* low = nullptr;  // bfloat16 y: the lower halves of float32 sums, whose upper halves are in y itself

  static int64_t bytes(int64_t panel, int64_t depth) { return panel * (int64_t)sizeof(B) * 32 / depth; }  // of 1024 weights
  int64_t stride(int64_t depth) const {
    if constexpr (int8_rows) return int8_row_stride(depth, *p.coding);
    return row_stride(depth, sizeof(A));
  }
  int64_t row_bytes() const { return lda * sizeof(A) + ldh * sizeof(H) + (int8_rows ? ldm : 0); }
  int64_t group_bytes() const { return p.group ? p.group << 20 : GROUP_BYTES; }
  int64_t rows_of_a_group() const { return std::max<int64_t>(64, group_bytes() / row_bytes()); }

  std::vector<std::vector<Segment>> groups() const {
    std::vector<std::vector<Segment>> found;
    int64_t most = rows_of_a_group(), left = 0;
    for (int64_t e = 0; e < p.E; e++)
      for (int64_t done = 0; done < p.count_E[e];) {
        int64_t rows = p.count_E[e] - done;
        if (left == 0 || (rows > left && rows <= most)) found.emplace_back(), left = most;
        rows = std::min(rows, left);
        found.back().push_back({e, p.offset_E1[e] + done, rows, most - left});
        done += rows, left -= rows;
      }
    return found;
  }

  void gather(int64_t first, int64_t row) {
    const X* from = (const X*)p.x + p.pair_R[first] / p.K * p.ldx;
    A* to = a + row * lda;
    if constexpr (int8_rows) return quantise_row(from, p.D, to, *p.coding);
    if (sizeof(X) == sizeof(A)) {
      memcpy(to, from, p.D * sizeof(X));
    } else {
      int64_t d = 0;
      for (; d + 16 <= p.D; d += 16) store((float*)to + d, load(from + d));
      for (; d < p.D; d++) ((float*)to)[d] = one(from + d);
    }
    memset(to + p.D, 0, (Dp - p.D) * sizeof(A));
  }

  bool in_place(const Segment& s, const Matrix& m) const {
    if constexpr (sizeof(B) > 1) return plain && ::in_place<Engine>(s.rows, m.k, m.n, m.depth, p.plain == 2, p.in_place);
    return false;
  }

  const B* packed(const Matrix& m, int64_t expert, int64_t begin, int64_t end, const Own& own) const {
    const B* w = m.w + expert * m.stride;
    if constexpr (sizeof(B) > 1)
      if (plain) return pack_strip(own.strip, w, m.k, m.n, m.depth, m.columns, begin, end, m.gated), own.strip;
    return w + begin * m.panel;
  }

  int64_t part_bytes() const {
    if constexpr (sizeof(B) > 1)
      if (plain) return up_to(InPlace<Engine>::part_bytes(std::max<int64_t>(InPlace<Engine>::FEW, p.in_place), std::max(p.D, p.F)), 4096);
    return 0;
  }

  // c = rows of a segment times columns first .. first + columns of its expert
  void times_in_place(const Segment& s, const Matrix& m, int64_t first, int64_t columns, const A* rows, int64_t ld, float* c,
                      int64_t ldc, const Own& own) const {
    if constexpr (sizeof(B) > 1) {
      const B* w = m.w + s.expert * m.stride + first * m.n;
      InPlace<Engine>::times(rows, ld, s.rows, w, m.k, m.n, m.depth, columns, c, ldc, p.plain == 2, own.part);
    }
  }

  void bias_of(int64_t expert, int64_t panel, f32x16 (&bias)[2]) const {
    bias[0] = bias[1] = f32x16{};
    if (p.b_in)
      for (int i = 0; i < PANEL; i++) {
        const int64_t n = gated ? panel * HALF + i % HALF : panel * PANEL + i;
        if (n < p.F) bias[i / HALF][i % HALF] = p.b_in[expert * G + n + (gated && i >= HALF ? p.F : 0)];
      }
  }

  Ahead ahead(const B* b, const Matrix& m) const {  // weights that were just packed are in the caches
    return plain ? Ahead{nullptr, 0} : Ahead::in(b, bytes(m.panel, packed_depth(m.depth)), p.prefetch ? p.prefetch : 8192);
  }

  void first_in_place(const Segment& s, int64_t begin, int64_t end, const Own& own) {
    const int64_t each = gated ? HALF : PANEL, f0 = begin * each, f1 = end * each, columns = std::min(p.F, f1) - f0, ldc = (end - begin) * PANEL;
    const bool all = gated && columns == p.F;  // gate and up are contiguous
    const int64_t up = all ? p.F : gated ? f1 - f0 : HALF;  // to the second half of a panel's sums
    const A* rows = a + s.at * lda;
    if (columns > 0) times_in_place(s, in, f0, all ? G : columns, rows, lda, own.c, ldc, own);
    if (columns > 0 && gated && !all) times_in_place(s, in, p.F + f0, columns, rows, lda, own.c + up, ldc, own);
    for (int64_t panel = begin; panel < end; panel++) {
      f32x16 bias[2];
      bias_of(s.expert, panel, bias);
      for (int64_t r = 0; r < s.rows; r++) {
        const float* sums = own.c + r * ldc + (panel - begin) * each;
        row_of(sums, sums + up, bias, h + (s.at + r) * ldh + panel * each);
      }
    }
    const int64_t filling = std::max(f0, p.F);  // not columns of h, and 0
    for (int64_t r = s.at; r < s.at + s.rows && filling < f1; r++) memset(h + r * ldh + filling, 0, (f1 - filling) * sizeof(H));
  }

  void lower(const Segment& s, int64_t begin, int64_t end, const Own& own) {
    const int64_t d0 = begin * PANEL, columns = std::min(p.D, end * PANEL) - d0;
    times_in_place(s, out, d0, columns, mid + s.at * ldm, ldm, o + s.at * ldo + d0, ldo, own);
  }

  void first(const Segment& s, int64_t begin, int64_t end, const Own& own) {
    if (in_place(s, in)) return first_in_place(s, begin, end, own);
    const int64_t most = std::max<int64_t>(Engine::STEP, CACHE_BYTES / (lda * sizeof(A)));
    const int64_t tiles = (s.rows + most - 1) / most, tile = up_to((s.rows + tiles - 1) / tiles, Engine::STEP);
    float c[2][Engine::STEP * PANEL] __attribute__((aligned(64)));
    struct {  // the previous block, whose activation is not computed yet
      const float* c;
      H* to;
      f32x16 bias[2];
      int rows, done;
    } last = {};
    auto one_row = [&] {
      if (last.done == last.rows) return;
      row_of(last.c + last.done * PANEL, last.c + last.done * PANEL + HALF, last.bias, last.to + last.done * ldh);
      last.done++;
    };
    const B* w = packed(in, s.expert, begin, end, own);
    int turn = 0;
    for (int64_t r0 = 0; r0 < s.rows; r0 += tile) {
      const int64_t m = std::min(tile, s.rows - r0), step = block_rows<Engine>(m, p.rows), blocks = (m + step - 1) / step;
      Ahead stream = ahead(w, in);
      for (int64_t panel = begin; panel < end; panel++) {
        f32x16 bias[2];
        bias_of(s.expert, panel, bias);
        const B* b = w + (panel - begin) * p.in_panel;
        Ahead share = Ahead::share(panel + 1 < end ? b + p.in_panel : nullptr, blocks, bytes(p.in_panel, Dp));
        for (int64_t r = 0; r < m; r += step, turn ^= 1) {
          const int rows = (int)std::min(step, m - r);
          const int64_t row = s.at + r0 + r;
          Engine::times(a + row * lda, lda, rows, b, Dp, c[turn], blocks == 1 || (panel == begin && r == 0) ? stream : share, one_row,
                        p.coding);
          while (last.done < last.rows) one_row();
          last = {c[turn], h + row * ldh + panel * (gated ? HALF : PANEL), {bias[0], bias[1]}, rows, 0};
        }
      }
    }
    while (last.done < last.rows) one_row();
  }

  static void add(float* y, uint16_t*, f32x16 v) { store(y, load(y) + v); }
  static void add(uint16_t* y, uint16_t* low, f32x16 v) {
    u32x16 sum = (wide(*(u16x16*)y) << 16) | wide(*(u16x16*)low);
    sum = (u32x16)((f32x16)sum + v);
    *(u16x16*)y = narrow(sum >> 16);
    *(u16x16*)low = narrow(sum);
  }

  struct Block {  // rows of one expert times a strip of panels, to be weighted and added to y
    const float* c;
    int64_t row, panel;  // from one to the next in c
    const int64_t* pair;
    const float* bias;  // may be null
    int rows;
    int64_t columns, d0, done;  // done: of rows x panels
  };

  void add_one(Block& k) {  // one row, 32 columns
    const int64_t wide = (k.columns + PANEL - 1) / PANEL;
    if (k.done == k.rows * wide) return;
    const int64_t i = k.done / wide, panel = k.done % wide, pair = k.pair[i], t = pair / p.K, d = panel * PANEL;
    k.done++;
    const f32x16 gate = all(p.gate[pair]);
    const float* c = k.c + panel * k.panel + i * k.row;
    X* y = (X*)p.y + t * p.D + k.d0 + d;
    uint16_t* l = low + t * ldl + k.d0 + d;
    for (int64_t j = 0; j < PANEL && d + j < k.columns; j += HALF) {
      const int64_t left = k.columns - d - j;
      f32x16 v = load(c + j);
      if (left >= HALF) {
        if (k.bias) v += load(k.bias + d + j);
        add(y + j, l + j, gate * v);
      } else {
        float bias[HALF] = {};
        X tail[HALF] = {};
        if (k.bias) memcpy(bias, k.bias + d + j, left * 4);
        memcpy(tail, y + j, left * sizeof(X));
        add(tail, l + j, gate * (v + load(bias)));
        memcpy(y + j, tail, left * sizeof(X));
      }
    }
  }

  void second(const std::vector<Segment>& group, int64_t begin, int64_t end, const Own& own) {
    float c[2][WIDEST * Engine::STEP * PANEL] __attribute__((aligned(64)));
    const int64_t d0 = begin * PANEL, columns = std::min(p.D, end * PANEL) - d0, wide = end - begin;
    Block last = {};
    auto one_part = [&] { add_one(last); };
    int turn = 0;
    for (size_t i = 0; i < group.size(); i++) {
      const Segment& s = group[i];
      const float* bias = p.b_out ? p.b_out + s.expert * p.D + d0 : nullptr;
      if (in_place(s, out)) {
        while (last.done < last.rows * wide) one_part();
        last = {o + s.at * ldo + d0, ldo, PANEL, p.pair_R + s.first, bias, (int)s.rows, columns, d0, 0};
        while (last.done < last.rows * wide) one_part();
        continue;
      }
      auto strip = [&](const Segment& s) { return out.w + s.expert * out.stride + begin * out.panel; };
      const B* b = packed(out, s.expert, begin, end, own);
      const int64_t step = block_rows<Engine>(s.rows, p.rows), blocks = (s.rows + step - 1) / step;
      Ahead stream = ahead(b, out);  // the first block reads weights from memory, others prefetch those of the next expert
      Ahead share = Ahead::share(i + 1 < group.size() && !plain ? strip(group[i + 1]) : nullptr, blocks - 1,
                                 bytes(p.out_panel, Fp));
      for (int64_t r = 0; r < s.rows; r += step, turn ^= 1) {
        const int rows = (int)std::min(step, s.rows - r);
        for (int64_t n = 0; n < wide; n++) {
          for (int64_t q = rows * n / wide; q < rows * (n + 1) / wide; q++) {
            const int64_t t = p.pair_R[s.first + r + q] / p.K;  // rows of y are anywhere: prefetch them
            for (int64_t d = 0; d < columns; d += 64 / sizeof(X)) {
              __builtin_prefetch((X*)p.y + t * p.D + d0 + d, 1, 2);
              if (low) __builtin_prefetch(low + t * ldl + d0 + d, 1, 2);
            }
          }
          Engine::times(mid + (s.at + r) * ldm, ldm, rows, b + n * p.out_panel, Fp, c[turn] + n * Engine::STEP * PANEL,
                        r ? share : stream, one_part, p.coding);
        }
        while (last.done < last.rows * wide) one_part();
        last = {c[turn], PANEL, Engine::STEP * PANEL, p.pair_R + s.first + r, bias, rows, columns, d0, 0};
      }
    }
    while (last.done < last.rows * wide) one_part();
  }

  void round_off(int64_t t) {  // bfloat16 only: both halves to one number
    X* y = (X*)p.y + t * p.D;
    for (int64_t d = 0; d < p.D; d += HALF) {
      uint16_t high[HALF] = {};
      const int64_t n = std::min<int64_t>(HALF, p.D - d);
      memcpy(high, y + d, n * 2);
      u32x16 sum = (wide(*(u16x16*)high) << 16) | wide(*(u16x16*)(low + t * ldl + d));
      store(high, (f32x16)sum);
      memcpy(y + d, high, n * 2);
    }
  }

  int run() {
    const bool split = sizeof(X) == 2;
    const auto all_groups = groups();
    int64_t most = 0;
    for (const auto& group : all_groups) most = std::max(most, group.back().at + group.back().rows);
    const int64_t a_bytes = up_to(most * lda * sizeof(A), 4096), h_bytes = up_to(most * ldh * sizeof(H), 4096);
    const int64_t m_bytes = int8_rows ? up_to(most * ldm, 4096) : 0, l_bytes = split ? up_to(p.T * ldl * 2, 4096) : 0;
    const int64_t o_bytes = plain ? up_to(most * ldo * 4, 4096) : 0;
    const int64_t first_panels = panels(G, gated), second_panels = panels(p.D, false);
    const int64_t enough = 4 * p.threads;  // tasks, so that no thread works alone for long at the end
    // panels that stay in the cache; when they are packed, their source passes through it too
    auto in_cache = [&](int64_t panel) { return CACHE_BYTES / (plain ? 2 : 1) / (panel * (int64_t)sizeof(B)); };
    const int64_t widest = sizeof(B) == 4 ? WIDEST / 2 : WIDEST;
    int64_t wide_first = plain ? std::clamp<int64_t>(in_cache(p.in_panel), 1, WIDEST / 2) : WIDEST / 2;
    int64_t broad = std::clamp<int64_t>(std::min(second_panels / enough, in_cache(p.out_panel)), 1, widest);
    if (p.strip) wide_first = std::min<int64_t>(p.strip, WIDEST);
    if (p.strip_out) broad = std::min<int64_t>(p.strip_out, WIDEST);

    const int64_t strip_bytes = plain ? up_to(std::max(wide_first * p.in_panel, broad * p.out_panel) * sizeof(B), 4096) : 0;
    const int64_t c_bytes = plain ? SUMS_BYTES : 0;
    const int64_t own_bytes = strip_bytes + c_bytes + part_bytes();
    char* memory = workspace.get(a_bytes + h_bytes + m_bytes + l_bytes + o_bytes + p.threads * own_bytes + 4096);
    if (!memory) return 1;
    a = (A*)memory, h = (H*)(memory + a_bytes), mid = int8_rows ? (A*)(memory + a_bytes + h_bytes) : (A*)h;
    low = split ? (uint16_t*)(memory + a_bytes + h_bytes + m_bytes) : nullptr;
    o = (float*)(memory + a_bytes + h_bytes + m_bytes + l_bytes);

    std::vector<NextTask> counters(p.nodes ? p.nodes->count * 2 * all_groups.size() : 0);
#pragma omp parallel num_threads(p.threads)
    {
      const OnNode here(p.nodes);
      char* mine = (char*)o + o_bytes + omp_get_thread_num() * own_bytes;
      char* sums = mine + strip_bytes;
      const Own own = {(B*)mine, (float*)sums, (float*)(sums + c_bytes)};
      int64_t loop = 0;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < p.T; t++) {
        memset((X*)p.y + t * p.D, 0, p.D * sizeof(X));
        if (split) memset(low + t * ldl, 0, ldl * 2);
      }
      Engine::begin();
      for (const auto& group : all_groups) {
        std::vector<Segment> order(group);  // every thread makes the same list
        std::stable_sort(order.begin(), order.end(), [](auto& l, auto& r) { return l.rows > r.rows; });
        const int64_t rows = group.back().at + group.back().rows;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
          const auto s = std::upper_bound(group.begin(), group.end(), row, [](int64_t r, auto& s) { return r < s.at; }) - 1;
          gather(s->first + row - s->at, row);
        }
        const int64_t wide = p.strip ? wide_first : std::clamp<int64_t>((int64_t)group.size() * first_panels / enough / 2, 1, wide_first);
        if (p.nodes) {
          by_node(*p.nodes, counters, loop++, here.node, group.size(), first_panels, wide,
                  [&](int64_t i, int64_t begin, int64_t end) { first(order[i], begin, end, own); });
        } else {
          const auto tasks = cut(order, first_panels, enough, [&](auto& s) { return in_place(s, in) ? (int64_t)IN_PLACE : wide; });
#pragma omp for schedule(dynamic, 1)
          for (size_t i = 0; i < tasks.size(); i++) first(order[tasks[i].segment], tasks[i].begin, tasks[i].end, own);
        }
        if constexpr (int8_rows) {
#pragma omp for schedule(static)
          for (int64_t row = 0; row < rows; row++) quantise_row(h + row * ldh, p.F, mid + row * ldm, *p.coding);
        }
        if (plain) {
          const auto tasks = cut(order, second_panels, enough, [&](auto& s) { return in_place(s, out) ? IN_PLACE : NONE; });
#pragma omp for schedule(dynamic, 1)
          for (size_t i = 0; i < tasks.size(); i++) lower(order[tasks[i].segment], tasks[i].begin, tasks[i].end, own);
        }
        if (p.nodes) {
          by_node(*p.nodes, counters, loop++, here.node, 1, second_panels, broad,
                  [&](int64_t, int64_t begin, int64_t end) { second(group, begin, end, own); });
        } else {
#pragma omp for schedule(dynamic, 1)
          for (int64_t begin = 0; begin < second_panels; begin += broad)
            second(group, begin, std::min(begin + broad, second_panels), own);
        }
      }
      Engine::end();
      if (split) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p.T; t++) round_off(t);
      }
    }
    if (workspace.size > (size_t)std::max(GROUP_BYTES, group_bytes()) * 4) workspace.release();
    return 0;
  }
};

template <class Engine, class X> static int forward(const Problem& p) { return Layer<Engine, X>{p}.run(); }
template <int CODE> static int coded(const Problem& p, int size) {
  if constexpr (CODE != E4M3)
    if (p.coding->int8_rows)
      return size == 4 ? forward<RowsOf8Bits<CODE>, float>(p) : forward<RowsOf8Bits<CODE>, uint16_t>(p);
  return size == 4 ? forward<Coded<CODE>, float>(p) : forward<Coded<CODE>, uint16_t>(p);
}

template <class B>
static void pack(B* dst, const B* src, int64_t se, int64_t sk, int64_t sn, int64_t E, int64_t depth, int64_t columns,
                 bool gated, int threads) {
  const int64_t each = panels(columns, gated), size = packed_depth(depth) * PANEL;
  const int64_t wide = 8, strips = (each + wide - 1) / wide;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < E * strips; i++) {
    const int64_t e = i / strips, begin = i % strips * wide, end = std::min(begin + wide, each);
    pack_strip(dst + (e * each + begin) * size, src + e * se, sk, sn, depth, columns, begin, end, gated);
  }
}

template <class B>  // the inverse of pack, into a contiguous tensor
static void unpack(B* dst, const B* src, int64_t E, int64_t depth, int64_t columns, bool gated, int threads) {
  const int64_t each = panels(columns, gated), size = packed_depth(depth) * PANEL, F = columns / 2;
  const int64_t step = sizeof(B) == 2 ? 2 : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < E * depth; i++) {
    const int64_t e = i / depth, k = i % depth;
    for (int64_t n = 0; n < columns; n++) {
      const int64_t c = gated ? n % F / HALF * PANEL + n % F % HALF + n / F * HALF : n;  // column of all panels
      const B* panel = src + (e * each + c / PANEL) * size;
      dst[i * columns + n] = panel[place<B>(k, c % PANEL / HALF) + c % HALF * step];
    }
  }
}

extern "C" {

int64_t mrb_packed_elements(int64_t depth, int64_t columns, int gated) {  // of one expert
  return panels(columns, gated) * packed_depth(depth) * PANEL;
}

void mrb_pack(void* dst, const void* src, int64_t se, int64_t sk, int64_t sn, int64_t E, int64_t depth, int64_t columns,
              int gated, int size, int threads) {
  if (size == 4) pack((float*)dst, (const float*)src, se, sk, sn, E, depth, columns, gated, threads);
  else pack((uint16_t*)dst, (const uint16_t*)src, se, sk, sn, E, depth, columns, gated, threads);
}

void mrb_unpack(void* dst, const void* src, int64_t E, int64_t depth, int64_t columns, int gated, int size, int threads) {
  if (size == 4) unpack((float*)dst, (const float*)src, E, depth, columns, gated, threads);
  else unpack((uint16_t*)dst, (const uint16_t*)src, E, depth, columns, gated, threads);
}

static bool plan_fits(const Problem& p) {
  for (int64_t e = 0; e < p.E; e++) {
    const int64_t begin = p.offset_E1[e], n = p.count_E[e];
    if (n < 0 || begin < 0 || n > p.R || begin > p.R - n) return false;
    for (int64_t r = begin; r < begin + n; r++)
      if (p.pair_R[r] < 0 || p.pair_R[r] >= p.T * p.K) return false;
  }
  return true;
}

// returns 0; 1: no memory; 3: the plan has an index outside
int mrb_forward(const Problem* p, int size, int packed_size) {  // bytes of an activation, and of a packed weight
  if (!plan_fits(*p)) return 3;
  if (p->coding && p->coding->code == INT8) return coded<INT8>(*p, size);
  if (p->coding && p->coding->code == E4M3) return coded<E4M3>(*p, size);
  if (p->coding) return coded<NIBBLE>(*p, size);
  if (packed_size < size) return forward<Vector<uint16_t>, float>(*p);
  return size == 4 ? forward<Float32, float>(*p) : forward<Bfloat16, uint16_t>(*p);
}
}
