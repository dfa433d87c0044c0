// What code a context multiplies by, for whoever asks before there is anything to multiply.
#include "qforge/context.h"

#include <stdexcept>

namespace qforge {
namespace {

std::string of_floats([[maybe_unused]] LinearPiece piece) {
#ifdef QFORGE_HAVE_AVX2
    if (piece == linear_avx512) return "avx512-vnni";
    if (piece == linear_avx2) return "avx2";
#endif
#ifdef QFORGE_HAVE_NEON
    if (piece == linear_neon) return "neon-dotprod";
#endif
    return "portable";
}

std::string of_bytes([[maybe_unused]] const IntegerFunctions *functions) {
#ifdef QFORGE_HAVE_AVX2
    if (functions == &integer_amx) return "amx";
    if (functions == &integer_avx512_vnni) return "avx512-vnni";
    if (functions == &integer_avx2) return "avx2";
#endif
    return "portable";
}

}  // namespace

std::string Context::code(const std::string &products) const {
    if (products == "floats") {
        const std::string few = of_floats(few_rows_), many = of_floats(many_rows_);
        return few == many ? few : few + ", " + many + " for many rows";
    }
    if (products == "bytes") return of_bytes(integer_);
    if (products == "bf16") return bf16_ == &bf16_portable ? "portable" : "amx";
    if (products == "blocks") return isa_;
    throw std::invalid_argument("there are no products of " + products);
}

}  // namespace qforge
