// The functions of layers.h for AVX2 + FMA (compiled with those flags; called only where CPUID has them).
#include <immintrin.h>

#include <type_traits>

#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_256.inl"
#include "layers.inl"

}  // namespace

const LayerFunctions layers_avx2{norm, residual, gate, rotate_and_store, attend};

}  // namespace qforge
