// qforge.ops._native: Python's view of the launchers. Addresses come as integers; qforge/ops/native.py checks dtype, shape and layout before it passes them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "qforge/context.h"

namespace nb = nanobind;
using qforge::Context;
using qforge::Format;
using qforge::Weight;

namespace {

template <typename T>
T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels of qforge";
    nb::enum_<Format>(m, "Format")
        .value("INT4", Format::INT4)
        .value("INT8", Format::INT8)
        .value("F32", Format::F32)
        .value("F16", Format::F16)
        .value("BF16", Format::BF16);
    nb::class_<Weight>(m, "Weight")
        .def(
            "__init__",
            [](Weight *self, Format format, int64_t columns, int64_t blocks, int64_t block_k, uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t bias) {
                new (self) Weight{format, columns, blocks, block_k, pointer<const uint8_t>(codes), pointer<const float>(scales), pointer<const uint8_t>(zeros), pointer<const float>(bias)};
            },
            nb::arg("format"), nb::arg("columns"), nb::arg("blocks"), nb::arg("block_k"), nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"), nb::arg("bias"));
    nb::class_<Context>(m, "Context")
        .def(nb::init<int, const std::string &>(), nb::arg("threads"), nb::arg("isa"))
        .def_prop_ro("threads", &Context::threads)
        .def_prop_ro("isa", &Context::isa)
        .def(
            "linear",
            [](Context &self, const Weight &weight, uintptr_t x, int64_t rows, int64_t x_stride, uintptr_t y, int64_t y_stride) {
                self.linear(weight, pointer<const float>(x), rows, x_stride, pointer<float>(y), y_stride);
            },
            nb::arg("weight"), nb::arg("x"), nb::arg("rows"), nb::arg("x_stride"), nb::arg("y"), nb::arg("y_stride"), nb::call_guard<nb::gil_scoped_release>());
    m.def("instruction_sets", &Context::instruction_sets, "The instruction sets that this CPU runs, fastest first.");
}
