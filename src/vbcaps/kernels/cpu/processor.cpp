// The questions that the loader asks a library before it calls kernels (library.py).

#include <cstdint>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if !defined(SOURCES_SUM)
#define SOURCES_SUM 0
#endif

namespace {

#if defined(__x86_64__)
// Returns whether bits of a register of CPUID (0 to 3: eax, ebx, ecx, edx) are all set.
bool has(unsigned leaf, int which, unsigned bits) {
  unsigned found[4] = {};
  return __get_cpuid_count(leaf, 0, &found[0], &found[1], &found[2], &found[3]) && (found[which] & bits) == bits;
}

// Returns whether the operating system saves these registers when it switches between programs.
bool keeps(unsigned registers) {
  if (!has(1, 2, 1u << 27)) return false;  // no XGETBV to ask with
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}
#else
bool has(unsigned, int, unsigned) { return false; }
bool keeps(unsigned) { return false; }
#endif

}  // namespace

extern "C" {

// Returns the checksum of the sources from which the library was built, or 0.
uint64_t sources() { return SOURCES_SUM; }

int has_baseline() { return 1; }

// AVX with FMA, AVX2; SSE and AVX registers.
int has_avx2() { return has(1, 2, 1u << 28 | 1u << 12) && has(7, 1, 1u << 5) && keeps(0x6); }

// AVX-512 F, DQ, BW and VL; SSE, AVX and AVX-512 registers.
int has_avx512() { return has_avx2() && has(7, 1, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) && keeps(0xe6); }

}  // extern "C"
