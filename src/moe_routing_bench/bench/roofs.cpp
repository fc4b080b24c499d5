// What this processor can do at most: bytes moved a second by working set, operations a second by unit.
// roofs.py asks for one measurement at a time, and only for units that the processor has.
#include <omp.h>
#include <sys/mman.h>
#include <cstddef>
#include <cstring>

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef long long vec __attribute__((vector_size(WIDTH)));

enum Pattern { READ, READ_STREAMS, COPY };
enum Unit { FMA, DOT_INT8, DOT_BF16, AMX_BF16, AMX_INT8 };

// Reads with STREAMS readers side by side. One is best in the nearest caches; from memory eight with prefetches are,
// because the processor's own prefetchers stop at the end of each page.
template <int STREAMS, int AHEAD>
static void read_all(const char* p, size_t bytes) {
  constexpr int N = 8 / STREAMS;
  const size_t part = bytes / STREAMS;
  vec sum[8] = {};
  for (size_t i = 0; i < part; i += N * WIDTH) {
#pragma GCC unroll 8
    for (int s = 0; s < STREAMS; s++)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) {
        const char* q = p + s * part + i + j * WIDTH;
        if (AHEAD) __builtin_prefetch(q + AHEAD);
        sum[s * N + j] ^= *(const vec*)q;
      }
  }
  for (int j = 1; j < 8; j++) sum[0] ^= sum[j];
#ifdef __aarch64__
  asm volatile("" ::"w"(sum[0]));
#else
  asm volatile("" ::"x"(sum[0]));
#endif
}

static void copy_half(char* p, size_t bytes) {
  const size_t half = bytes / 2;
  for (size_t i = 0; i < half; i += 4 * WIDTH)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) *(vec*)(p + half + i + j * WIDTH) = *(const vec*)(p + i + j * WIDTH);
}

// Twelve sums (on ARM twenty-four) that do not wait for one another, of zeros: nothing is ever a denormal number.
#ifdef __aarch64__
#define EACH(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11) op(12) op(13) op(14) op(15) \
    op(16) op(17) op(18) op(19) op(20) op(21) op(22) op(23)
#define SOURCES(op) op(30) op(31)
#define ZERO(n) "movi v" #n ".4s, #0\n"
#define STEPS "subs %0, %0, #1\n b.ne 1b\n"
#define TOUCHED "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", \
    "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v30", "v31"
#define FMLA(n) "fmla v" #n ".4s, v30.4s, v31.4s\n"
#define SDOT(n) "sdot v" #n ".4s, v30.16b, v31.16b\n"
#else
#define EACH(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define SOURCES(op) op(14) op(15)
#if WIDTH == 64
#define R "%%zmm"
#else
#define R "%%ymm"
#endif
#define ZERO(n) "vxorps %%ymm" #n ", %%ymm" #n ", %%ymm" #n "\n"
#define STEPS "dec %0\n jnz 1b\n"
#define TOUCHED "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
    "xmm14", "xmm15"
#define FMADD(n) "vfmadd231ps " R "14, " R "15, " R #n "\n"
#define VNNI(n) "vpdpbusd " R "14, " R "15, " R #n "\n"
#define BF16(n) "vdpbf16ps " R "14, " R "15, " R #n "\n"
#endif
#define LOOP(op) asm volatile(EACH(ZERO) SOURCES(ZERO) "1:\n" EACH(op) STEPS : "+r"(steps) : : TOUCHED)
#ifdef __aarch64__
constexpr double IN_STEP = 24;
#else
constexpr double IN_STEP = 12;
#endif

#ifdef __x86_64__
template <bool INT8>
static void tiles(long steps) {
  alignas(64) unsigned char config[64] = {1};  // eight tiles of 16 rows of 64 bytes
  for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = 16;
#define ALL_TILES(op) op(0) op(1) op(2) op(3) op(4) op(5)
#define TILE_ZERO(n) "tilezero %%tmm" #n "\n"
#define TILE_BF16(n) "tdpbf16ps %%tmm7, %%tmm6, %%tmm" #n "\n"
#define TILE_INT8(n) "tdpbusd %%tmm7, %%tmm6, %%tmm" #n "\n"
  asm volatile("ldtilecfg %0\n" ALL_TILES(TILE_ZERO) TILE_ZERO(6) TILE_ZERO(7) : : "m"(config));
  if (INT8)
    asm volatile("1:\n" ALL_TILES(TILE_INT8) STEPS : "+r"(steps) : : "cc");
  else
    asm volatile("1:\n" ALL_TILES(TILE_BF16) STEPS : "+r"(steps) : : "cc");
  asm volatile("tilerelease");
}
#endif

// Does the steps; how many operations each has, a product and a sum being two; 0 if this unit is not compiled in.
static double compute(int unit, long steps) {
  switch (unit) {
#ifdef __aarch64__
    case FMA: if (steps) LOOP(FMLA); return IN_STEP * 8;
    case DOT_INT8: if (steps) LOOP(SDOT); return IN_STEP * 32;
#else
    case FMA: if (steps) LOOP(FMADD); return IN_STEP * WIDTH / 2;
#if WIDTH == 64
    case DOT_INT8: if (steps) LOOP(VNNI); return IN_STEP * 128;
    case DOT_BF16: if (steps) LOOP(BF16); return IN_STEP * 64;
    case AMX_BF16: if (steps) tiles<false>(steps); return 6 * 2.0 * 16 * 16 * 32;
    case AMX_INT8: if (steps) tiles<true>(steps); return 6 * 2.0 * 16 * 16 * 64;
#endif
#endif
  }
  return 0;
}

// Seconds from when all threads begin until the last has ended.
template <class Work>
static double seconds_of(int threads, Work work) {
  double begin = 0, end = 0;
#pragma omp parallel num_threads(threads)
  {
#pragma omp barrier
#pragma omp master
    begin = omp_get_wtime();
#pragma omp barrier
    work(omp_get_thread_num());
#pragma omp barrier
#pragma omp master
    end = omp_get_wtime();
  }
  return end - begin;
}

extern "C" {

char* mrb_memory(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);
  memset(p, 1, bytes);
  return (char*)p;
}

void mrb_release(char* p, size_t bytes) { munmap(p, bytes); }

// bytes: of all threads together, each with its own part; a multiple of 1 KiB for each.
double mrb_move(int pattern, char* p, size_t bytes, int threads, int passes) {
  const size_t part = bytes / threads / 1024 * 1024;
  return seconds_of(threads, [=](int t) {
    for (int pass = 0; pass < passes; pass++) {
      asm volatile("" ::: "memory");
      if (pattern == READ) read_all<1, 0>(p + t * part, part);
      if (pattern == READ_STREAMS) read_all<8, 1024>(p + t * part, part);
      if (pattern == COPY) copy_half(p + t * part, part);
    }
  });
}

double mrb_work(int unit) { return compute(unit, 0); }

double mrb_compute(int unit, int threads, long steps) {
  return seconds_of(threads, [=](int) { compute(unit, steps); });
}
}
