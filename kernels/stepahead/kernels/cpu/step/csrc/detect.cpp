// See detect.h.
#include "detect.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace step {

static bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

// AMX-TILE and AMX-BF16, and tiles of the size that the path is written for (Intel SDM, volume 2, CPUID).
[[maybe_unused]] static bool has_tiles() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (!(edx >> 22 & 1) || !(edx >> 24 & 1)) return false;
  if (!__get_cpuid_count(0x1d, 1, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned row_bytes = ebx & 0xffff, num_tiles = ebx >> 16, rows = ecx & 0xffff;
  return row_bytes == 64 && num_tiles >= 8 && rows == 16;
}

// Whether the system saves tiles, and lets this process use them: Linux keeps 8 KiB per thread only for those who ask.
// One answer is for the whole process and its threads, and does not change.
[[maybe_unused]] static bool may_use_tiles() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 27 & 1)) return false;  // no XGETBV
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const uint32_t tile_state = 3u << 17;  // XTILECFG, XTILEDATA
  if ((low & tile_state) != tile_state) return false;
  const long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, asm/prctl.h
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

static bool cpu_has(Isa isa) {
  __builtin_cpu_init();
  switch (isa) {
    case ISA_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case ISA_AVX512_BF16:
      return has_avx512_bf16();
    case ISA_AMX_BF16:
#ifdef STEP_EMULATE_TILES
      return has_avx512_bf16();
#else
      return has_avx512_bf16() && has_tiles() && may_use_tiles();
#endif
  }
  return false;
}

#ifdef STEP_EMULATE_TILES  // nothing else is in that library
const Kernels* kernels_for(Isa isa, bool bf16) { return isa == ISA_AMX_BF16 && bf16 ? amx_kernels() : nullptr; }
#else
const Kernels* kernels_for(Isa isa, bool bf16) {
  if (isa == ISA_AVX2) return avx2_kernels(bf16);
  return isa == ISA_AMX_BF16 && bf16 ? amx_kernels() : avx512_kernels(bf16);
}
#endif

bool has_isa(Isa isa) { return kernels_for(isa, true) && cpu_has(isa); }

bool left_out(Isa isa) { return !kernels_for(isa, true) && cpu_has(isa); }

}  // namespace step
