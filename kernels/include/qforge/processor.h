// Which x86 processor runs this, where that decides what is faster: bits never depend on it.
#pragma once

namespace qforge {

// `static` as in half.h. Zen 3 and Zen 4 are one family; only the latter has AVX-512.
[[maybe_unused]] static bool is_zen4() { return __builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f"); }

}  // namespace qforge
