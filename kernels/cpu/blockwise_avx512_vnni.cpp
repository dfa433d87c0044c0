// Products with activations rounded by segments for AVX-512 with VNNI (compiled with those flags; called only where CPUID has them).
#include "vnni_512.inl"

#include "blockwise_x86.inl"

namespace qforge {

const BlockwiseFunctions blockwise_avx512_vnni = {round_rows, piece};

}  // namespace qforge
