// qforge.ops._native: Python's view of the launchers. Addresses come as integers; qforge/ops/native.py checks dtype, shape and layout before it passes them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "decoder.h"
#include "qforge/context.h"
#include "qforge/mapped_file.h"

namespace nb = nanobind;
using qforge::Activation;
using qforge::Activations;
using qforge::Attention;
using qforge::Cache;
using qforge::CacheType;
using qforge::Context;
using qforge::Format;
using qforge::kTile;
using qforge::MappedFile;
using qforge::Weight;

namespace {

template <typename T>
T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// The zero point of every column and block, or -1
int common_zero(const Weight &w) {
    const int64_t whole = w.columns / kTile * w.blocks * kTile, last = w.columns % kTile;
    if (w.blocks == 0 || w.columns == 0 || (whole && std::memcmp(w.zeros, w.zeros + 1, static_cast<size_t>(whole - 1)) != 0)) return -1;
    for (int64_t i = whole; last && i < whole + w.blocks * kTile; ++i)
        if (i % kTile < last && w.zeros[i] != w.zeros[0]) return -1;
    return w.zeros[0];
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels of qforge";
    nb::enum_<Format>(m, "Format")
        .value("INT4", Format::INT4)
        .value("INT8", Format::INT8)
        .value("F32", Format::F32)
        .value("F16", Format::F16)
        .value("BF16", Format::BF16)
        .value("BOOK4", Format::BOOK4)
        .value("E4M3", Format::E4M3);
    nb::enum_<Activations>(m, "Activations").value("F32", Activations::F32).value("INT8", Activations::INT8).value("INT16", Activations::INT16).value("BF16", Activations::BF16);
    nb::class_<Weight>(m, "Weight")
        .def(
            "__init__",
            [](Weight *self, Format format, int64_t columns, int64_t blocks, int64_t block_k, int64_t run, uintptr_t codes, uintptr_t scales, uintptr_t half_scales, uintptr_t zeros,
               uintptr_t code_sums, uintptr_t pair_sums, uintptr_t book, uintptr_t bias, Activations activations) {
                new (self) Weight{format, columns, blocks, block_k, run, pointer<const uint8_t>(codes), pointer<const float>(scales), pointer<const uint8_t>(zeros),
                                  pointer<const float>(book), pointer<const float>(bias), activations, -1, pointer<const uint16_t>(half_scales), pointer<const int16_t>(code_sums), pointer<const int32_t>(pair_sums)};
                if (half_scales && activations != Activations::INT8 && activations != Activations::INT16) throw std::invalid_argument("scales in fp16 are for products with activations that are rounded by segments");
                if (qforge::centered(*self) && !code_sums) throw std::invalid_argument("activations that are rounded around a middle need the sums of the weight's codes");
                if (pair_sums && !(qforge::centered(*self) && block_k % qforge::kCentered == 0)) throw std::invalid_argument("sums of pairs are for whole segments of 64 inputs around a middle");
                if (activations == Activations::BF16 && format != Format::INT4 && format != Format::INT8 && format != Format::BOOK4) throw std::invalid_argument("bf16 products take packed integers and code books");
                if (self->zeros) self->zero = common_zero(*self);
            },
            nb::arg("format"), nb::arg("columns"), nb::arg("blocks"), nb::arg("block_k"), nb::arg("run"), nb::arg("codes"), nb::arg("scales"), nb::arg("half_scales"), nb::arg("zeros"),
            nb::arg("code_sums"), nb::arg("pair_sums"), nb::arg("book"), nb::arg("bias"), nb::arg("activations") = Activations::F32)
        .def_ro("zero", &Weight::zero);
    nb::enum_<Activation>(m, "Activation").value("SILU", Activation::SILU).value("GELU_TANH", Activation::GELU_TANH);
    nb::enum_<CacheType>(m, "CacheType").value("F32", CacheType::F32).value("F16", CacheType::F16).value("I8", CacheType::I8).value("BF16", CacheType::BF16).value("F8", CacheType::F8);
    nb::class_<Cache>(m, "Cache")
        .def(
            "__init__",
            [](Cache *self, CacheType type, uintptr_t memory, int64_t block_bytes, int64_t kv_heads, int64_t head_dim, int64_t block_size, bool scaled, float key_scale,
               float value_scale) {
                if (type == CacheType::I8 && head_dim > qforge::kLongestIntegerHead) throw std::invalid_argument("a cache in int8 holds heads of at most 512 dimensions");
                if (type == CacheType::I8 && !scaled) throw std::invalid_argument("in a cache in int8 each key and each value has a scale of its own");
                const Cache cache{type, pointer<char>(memory), block_bytes, kv_heads, head_dim, block_size, scaled, key_scale, value_scale};
                if (cache.layer_bytes() > block_bytes) throw std::invalid_argument("a block is too small for a layer");
                new (self) Cache(cache);
            },
            nb::arg("type"), nb::arg("memory"), nb::arg("block_bytes"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("block_size"), nb::arg("scaled"), nb::arg("key_scale"),
            nb::arg("value_scale"));
    nb::class_<MappedFile>(m, "MappedFile")
        .def(
            "__init__",
            [](MappedFile *self, int file, int64_t bytes) {
                try {
                    new (self) MappedFile(file, bytes);
                } catch (const std::system_error &e) {
                    errno = e.code().value();
                    PyErr_SetFromErrno(PyExc_OSError);
                    throw nb::python_error();
                }
            },
            nb::arg("file"), nb::arg("bytes"))
        .def_prop_ro("address", [](const MappedFile &self) { return reinterpret_cast<uintptr_t>(self.data()); })
        .def_prop_ro("moved", &MappedFile::moved, "Bytes that lie in huge pages by now.")
        .def("move_later", &MappedFile::move_later, nb::arg("seconds"), "Into huge pages, after so many seconds, while it is read.");
    nb::class_<Context> context(m, "Context");
    context
        .def(nb::init<int, const std::string &>(), nb::arg("threads"), nb::arg("isa"))
        .def_prop_ro("threads", &Context::threads)
        .def_prop_ro("isa", &Context::isa)
        .def("code", &Context::code, nb::arg("products"))
        .def("exchange", &Context::exchange, nb::call_guard<nb::gil_scoped_release>(), "Nanoseconds until threads have seen what each other wrote; 0 where one does not come at once.")
        .def(
            "linear",
            [](Context &self, const Weight &weight, uintptr_t x, int64_t rows, int64_t x_stride, uintptr_t y, int64_t y_stride) {
                self.linear(weight, pointer<const float>(x), rows, x_stride, pointer<float>(y), y_stride);
            },
            nb::arg("weight"), nb::arg("x"), nb::arg("rows"), nb::arg("x_stride"), nb::arg("y"), nb::arg("y_stride"), nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "weight_sum", [](const Context &self, uintptr_t logits, int64_t n, double largest, double inverse) { return self.weight_sum()(pointer<const float>(logits), n, largest, inverse); },
        nb::arg("logits"), nb::arg("n"), nb::arg("largest"), nb::arg("inverse"), "The sum of e^((logit - largest) * inverse), as draws take it.");
    context.def("gates", &Context::gates, nb::arg("gate_up"), nb::arg("down"), nb::arg("rows"), "Whether linear_gated takes the weights, and with integers so many rows.");
    context.def(
        "linear_gated",
        [](Context &self, const Weight &gate_up, const Weight &down, uintptr_t x, int64_t rows, int64_t x_stride, uintptr_t y, int64_t y_stride, Activation activation) {
            if (!self.gates(gate_up, down, rows)) throw std::invalid_argument("between the products with these weights no gates are applied here, or not for so few rows");
            self.linear_gated(gate_up, down, pointer<const float>(x), rows, x_stride, pointer<float>(y), y_stride, activation);
        },
        nb::arg("gate_up"), nb::arg("down"), nb::arg("x"), nb::arg("rows"), nb::arg("x_stride"), nb::arg("y"), nb::arg("y_stride"), nb::arg("activation"), nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "linear_int8",
        [](Context &self, const Weight &weight, uintptr_t x, int64_t rows, int64_t x_stride, float static_scale, uintptr_t y, int64_t y_stride) {
            self.linear_int8(weight, pointer<const float>(x), rows, x_stride, static_scale, pointer<float>(y), y_stride);
        },
        nb::arg("weight"), nb::arg("x"), nb::arg("rows"), nb::arg("x_stride"), nb::arg("static_scale"), nb::arg("y"), nb::arg("y_stride"),
        nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "read", [](Context &self, uintptr_t words, int64_t count) { return self.read(pointer<const uint64_t>(words), count); }, nb::arg("words"), nb::arg("count"),
        nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "checksum", [](Context &self, uintptr_t bytes, int64_t count) { return self.checksum(pointer<const uint64_t>(bytes), count / 8); }, nb::arg("address"), nb::arg("bytes"),
        nb::call_guard<nb::gil_scoped_release>(), "Of 8-byte words; a rest is left out.");
    context.def(
        "norm",
        [](Context &self, uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t width, float eps) {
            self.norm({pointer<const float>(x), pointer<const float>(weight), pointer<float>(y), width, eps}, rows);
        },
        nb::arg("x"), nb::arg("weight"), nb::arg("y"), nb::arg("rows"), nb::arg("width"), nb::arg("eps"), nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "gate",
        [](Context &self, uintptr_t x, uintptr_t y, int64_t rows, int64_t width, Activation activation) {
            self.gate({pointer<const float>(x), pointer<float>(y), width, activation}, rows);
        },
        nb::arg("x"), nb::arg("y"), nb::arg("rows"), nb::arg("width"), nb::arg("activation"), nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "attention",
        [](Context &self, const Cache &cache, uintptr_t qkv, uintptr_t out, int64_t heads, int64_t window, float scale, uintptr_t q_norm, uintptr_t k_norm, float norm_eps,
           uintptr_t cosines, uintptr_t sines, uintptr_t positions, uintptr_t slots, uintptr_t block_tables, int64_t table_stride, uintptr_t query_starts,
           int64_t sequences, const Weight *next, bool whole_norms) {
            const Attention a{cache, pointer<float>(qkv), pointer<float>(out), heads, window, scale, pointer<const float>(q_norm), pointer<const float>(k_norm), norm_eps,
                              pointer<const float>(cosines), pointer<const float>(sines), pointer<const int64_t>(positions), pointer<const int64_t>(slots),
                              pointer<const int32_t>(block_tables), table_stride, whole_norms};
            if (next && !self.rounds(a, *next)) throw std::invalid_argument("attention does not round for this weight");
            self.attention(a, pointer<const int32_t>(query_starts), sequences, next);
        },
        nb::arg("cache"), nb::arg("qkv"), nb::arg("out"), nb::arg("heads"), nb::arg("window"), nb::arg("scale"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("norm_eps"),
        nb::arg("cosines"), nb::arg("sines"), nb::arg("positions"), nb::arg("slots"), nb::arg("block_tables"), nb::arg("table_stride"),
        nb::arg("query_starts"), nb::arg("sequences"), nb::arg("next").none() = nb::none(), nb::arg("whole_norms") = false, nb::call_guard<nb::gil_scoped_release>());
    context.def(
        "linear_rounded",
        [](Context &self, const Weight &weight, int64_t rows, uintptr_t y, int64_t y_stride) { self.linear_rounded(weight, rows, pointer<float>(y), y_stride); },
        nb::arg("weight"), nb::arg("rows"), nb::arg("y"), nb::arg("y_stride"), nb::call_guard<nb::gil_scoped_release>(), "Of the rows that attention has rounded for the weight.");
    context.def(
        "bring",
        [](Context &self, const Cache &cache, int64_t heads, int64_t window, uintptr_t positions, uintptr_t block_tables, int64_t table_stride, uintptr_t query_starts, int64_t sequences) {
            Attention a{};
            a.cache = cache;
            a.heads = heads;
            a.window = window;
            a.positions = pointer<const int64_t>(positions);
            a.block_tables = pointer<const int32_t>(block_tables);
            a.table_stride = table_stride;
            self.bring(a, pointer<const int32_t>(query_starts), sequences, 1);
        },
        nb::arg("cache"), nb::arg("heads"), nb::arg("window"), nb::arg("positions"), nb::arg("block_tables"), nb::arg("table_stride"), nb::arg("query_starts"), nb::arg("sequences"),
        "As a step does by itself: for tests, with bring_nothing and lines_ahead.");
    context.def("bring_nothing", &Context::bring_nothing);
    context.def(
        "lines_ahead",
        [](Context &self) {
            std::vector<std::vector<uintptr_t>> lines(static_cast<size_t>(self.threads()));
            for (int thread = 0; thread < self.threads(); ++thread) {
                auto ahead = self.cache_ahead(thread);
                while (const char *line = ahead.next()) lines[static_cast<size_t>(thread)].push_back(reinterpret_cast<uintptr_t>(line));
            }
            return lines;
        },
        "Addresses that each thread has yet to bring: fetching changes no result, so tests look at them.");
    bind_decoder(m);
    m.def("instruction_sets", &Context::instruction_sets, "The instruction sets that this CPU runs, fastest first.");
}
