// qforge.methods._solver: Python's view of solver.h and products.h. Addresses come as integers; qforge/methods/native.py checks dtype, shape and layout before it passes them.
#include <nanobind/nanobind.h>

#include "qforge/products.h"
#include "qforge/solver.h"

namespace nb = nanobind;
using qforge::Grid;
using qforge::Pool;

namespace {

template <typename T>
T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

}  // namespace

NB_MODULE(_solver, m) {
    m.doc() = "Native loops of qforge's quantization methods";
    nb::class_<Pool>(m, "Pool").def(nb::init<int>(), nb::arg("threads"));
    m.def(
        "gptq_solve",
        [](Pool &pool, uintptr_t lower, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t group, float low, float high, int64_t in_features,
           int64_t out_features, uintptr_t codes) {
            const Grid grid{pointer<const float>(scales), pointer<const uint8_t>(zeros), pointer<const int32_t>(group), low, high};
            qforge::gptq_solve(pool, pointer<const float>(lower), pointer<const float>(weight), grid, in_features, out_features, pointer<int8_t>(codes));
        },
        nb::arg("pool"), nb::arg("lower"), nb::arg("weight"), nb::arg("scales"), nb::arg("zeros"), nb::arg("group"), nb::arg("low"), nb::arg("high"),
        nb::arg("in_features"), nb::arg("out_features"), nb::arg("codes"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "refine_codes",
        [](Pool &pool, uintptr_t hessian, uintptr_t scales, uintptr_t group, float low, float high, int64_t in_features, int64_t out_features, int sweeps,
           uintptr_t gradient, uintptr_t codes) {
            const Grid grid{pointer<const float>(scales), nullptr, pointer<const int32_t>(group), low, high};
            qforge::refine_codes(pool, pointer<const float>(hessian), grid, in_features, out_features, sweeps, pointer<float>(gradient), pointer<int8_t>(codes));
        },
        nb::arg("pool"), nb::arg("hessian"), nb::arg("scales"), nb::arg("group"), nb::arg("low"), nb::arg("high"), nb::arg("in_features"),
        nb::arg("out_features"), nb::arg("sweeps"), nb::arg("gradient"), nb::arg("codes"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "refine_columns",
        [](uintptr_t outputs, uintptr_t hessian, uintptr_t scales, uintptr_t group, float low, float high, int64_t inputs, int64_t out_features, uintptr_t gradient,
           uintptr_t codes) {
            const Grid grid{pointer<const float>(scales), nullptr, pointer<const int32_t>(group), low, high};
            qforge::refine_columns(pointer<const float>(outputs), pointer<const float>(hessian), grid, inputs, out_features, pointer<float>(gradient), pointer<int8_t>(codes));
        },
        nb::arg("outputs"), nb::arg("hessian"), nb::arg("scales"), nb::arg("group"), nb::arg("low"), nb::arg("high"), nb::arg("inputs"), nb::arg("out_features"),
        nb::arg("gradient"), nb::arg("codes"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "refine_group_scales",
        [](uintptr_t outputs, uintptr_t hessian, uintptr_t steps, int64_t inputs, int64_t out_features, uintptr_t gradient, uintptr_t scales) {
            qforge::refine_group_scales(pointer<const float>(outputs), pointer<const float>(hessian), pointer<const float>(steps), inputs, out_features,
                                        pointer<float>(gradient), pointer<float>(scales));
        },
        nb::arg("outputs"), nb::arg("hessian"), nb::arg("steps"), nb::arg("inputs"), nb::arg("out_features"), nb::arg("gradient"), nb::arg("scales"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "best_scale",
        [](Pool &pool, uintptr_t weight, uintptr_t importance, uintptr_t scales, uintptr_t zeros, float low, float high, int64_t candidates, int64_t rows,
           int64_t groups, int64_t size, uintptr_t best) {
            qforge::best_scale(pool, pointer<const float>(weight), pointer<const float>(importance), pointer<const float>(scales), pointer<const uint8_t>(zeros), low,
                               high, candidates, rows, groups, size, pointer<int32_t>(best));
        },
        nb::arg("pool"), nb::arg("weight"), nb::arg("importance"), nb::arg("scales"), nb::arg("zeros"), nb::arg("low"), nb::arg("high"), nb::arg("candidates"),
        nb::arg("rows"), nb::arg("groups"), nb::arg("size"), nb::arg("best"), nb::call_guard<nb::gil_scoped_release>());
    m.attr("TILE") = qforge::kTile;
    m.def("has_bf16_products", &qforge::has_bf16_products);
    m.def("has_bf16_tiles", &qforge::has_bf16_tiles);
    m.def(
        "add_products",
        [](Pool &pool, uintptr_t left, uintptr_t right, int64_t tokens, int64_t left_width, int64_t right_width, bool lower, uintptr_t into) {
            qforge::add_products(pool, pointer<const float>(left), pointer<const float>(right), tokens, left_width, right_width, lower, pointer<float>(into));
        },
        nb::arg("pool"), nb::arg("left"), nb::arg("right"), nb::arg("tokens"), nb::arg("left_width"), nb::arg("right_width"), nb::arg("lower"), nb::arg("into"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "multiply",
        [](Pool &pool, uintptr_t x, int64_t tokens, int64_t inputs, uintptr_t weight, int64_t outputs, uintptr_t y) {
            qforge::multiply(pool, pointer<const float>(x), tokens, inputs, pointer<const float>(weight), outputs, pointer<float>(y));
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("weight"), nb::arg("outputs"), nb::arg("y"), nb::call_guard<nb::gil_scoped_release>());
}
