// Python's view of the decoder. Addresses come as integers; qforge/runtime/native_decoder.py keeps what they point to, and checks dtypes and shapes.
#include "decoder.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "qforge/decoder.h"

namespace nb = nanobind;
using namespace qforge;

namespace {

template <typename T>
T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

Step step_of(uintptr_t tokens, uintptr_t positions, uintptr_t slots, uintptr_t tables, uintptr_t starts, uintptr_t wanted, int64_t rows, int64_t sequences, int64_t table_stride,
             int64_t num_wanted) {
    return {pointer<const int64_t>(tokens), pointer<const int64_t>(positions), pointer<const int64_t>(slots), pointer<const int32_t>(tables), pointer<const int32_t>(starts),
            pointer<const int64_t>(wanted), rows, sequences, table_stride, num_wanted};
}

}  // namespace

void bind_decoder(nb::module_ &m) {
    nb::enum_<Arithmetic>(m, "Arithmetic").value("FP32", Arithmetic::FP32).value("INT8", Arithmetic::INT8);
    nb::class_<Part>(m, "Part")
        .def(
            "__init__",
            [](Part *self, const Weight &weight, Arithmetic arithmetic, float static_scale, int64_t inputs, uintptr_t gather) {
                new (self) Part{weight, arithmetic, static_scale, inputs, pointer<const int64_t>(gather), {}};
            },
            nb::arg("weight"), nb::arg("arithmetic"), nb::arg("static_scale"), nb::arg("inputs"), nb::arg("gather"))
        .def(
            "__init__",
            [](Part *self, int64_t columns, int64_t inputs, Elsewhere elsewhere) {
                Weight none{};
                none.columns = columns;
                new (self) Part{none, Arithmetic::FP32, 0, inputs, nullptr, std::move(elsewhere)};
            },
            nb::arg("columns"), nb::arg("inputs"), nb::arg("elsewhere"));
    nb::class_<Layer>(m, "Layer").def(
        "__init__",
        [](Layer *self, const std::vector<uintptr_t> &norms, Product qkv, Product output, Product router, std::vector<std::pair<Product, Product>> mlps, const Cache &cache,
           int64_t heads, int64_t window, int64_t rope, float scale, bool whole_norms) {
            if (norms.size() != 6) throw std::invalid_argument("a layer has six norms, any of them 0");
            int64_t experts = 0;
            for (const Part &part : router) experts += part.weight.columns;
            if (static_cast<int64_t>(mlps.size()) != std::max<int64_t>(experts, 1)) throw std::invalid_argument("a layer has one MLP, or one for each output of its router");
            if (whole_norms && (!norms[4] || !norms[5])) throw std::invalid_argument("queries and keys are normed both, or neither");
            const auto norm = [&](size_t i) { return pointer<const float>(norms[i]); };
            std::vector<Mlp> all;
            for (auto &[gate_up, down] : mlps) all.push_back({std::move(gate_up), std::move(down)});
            new (self) Layer{norm(0), norm(1), norm(2), norm(3), norm(4), norm(5), std::move(qkv), std::move(output), std::move(router), std::move(all), cache, heads, window, rope, scale, whole_norms};
        },
        nb::arg("norms"), nb::arg("qkv"), nb::arg("output"), nb::arg("router"), nb::arg("mlps"), nb::arg("cache"), nb::arg("heads"), nb::arg("window"), nb::arg("rope"), nb::arg("scale"),
        nb::arg("whole_norms"));
    nb::class_<Embedding>(m, "Embedding")
        .def(
            "__init__",
            [](Embedding *self, Format format, uintptr_t table, float scale) { new (self) Embedding{format, pointer<const void>(table), {}, nullptr, scale}; },
            nb::arg("format"), nb::arg("table"), nb::arg("scale"))
        .def(
            "__init__",
            [](Embedding *self, const Weight &tiles, uintptr_t gather, float scale) { new (self) Embedding{tiles.format, nullptr, tiles, pointer<const int64_t>(gather), scale}; },
            nb::arg("tiles"), nb::arg("gather"), nb::arg("scale"));
    nb::class_<Decoder>(m, "Decoder")
        .def(
            "__init__",
            [](Decoder *self, Context &context, int64_t width, int64_t vocabulary, float norm_eps, Activation activation, int64_t active_experts, bool normalized_experts,
               const Embedding &embedding, uintptr_t norm, std::vector<Layer> layers, Product head, double far_ns) {
                for (const Layer &layer : layers)
                    if (!layer.router.empty() && (active_experts < 1 || active_experts > static_cast<int64_t>(layer.mlps.size()))) throw std::invalid_argument("a token has at least one expert, and no more than there are");
                new (self) Decoder(context, {width, vocabulary, norm_eps, activation, active_experts, normalized_experts}, embedding, pointer<const float>(norm), std::move(layers), std::move(head), far_ns);
            },
            nb::arg("context"), nb::arg("width"), nb::arg("vocabulary"), nb::arg("norm_eps"), nb::arg("activation"), nb::arg("active_experts"), nb::arg("normalized_experts"),
            nb::arg("embedding"), nb::arg("norm"), nb::arg("layers"), nb::arg("head"), nb::arg("far_ns"), nb::keep_alive<1, 2>())
        .def_prop_ro("steps_apart", &Decoder::steps_apart)
        .def(
            "set_ropes",
            [](Decoder &self, const std::vector<std::pair<uintptr_t, uintptr_t>> &tables) {
                std::vector<RopeTables> ropes;
                for (const auto &[cosines, sines] : tables) ropes.push_back({pointer<const float>(cosines), pointer<const float>(sines)});
                self.set_ropes(std::move(ropes));
            },
            nb::arg("tables"))
        .def(
            "logits",
            [](Decoder &self, uintptr_t tokens, uintptr_t positions, uintptr_t slots, uintptr_t tables, uintptr_t starts, uintptr_t wanted, int64_t rows, int64_t sequences,
               int64_t table_stride, int64_t num_wanted, uintptr_t logits) {
                self.logits(step_of(tokens, positions, slots, tables, starts, wanted, rows, sequences, table_stride, num_wanted), pointer<float>(logits));
            },
            nb::call_guard<nb::gil_scoped_release>(), "Logits [wanted, vocabulary] fp32 of a step's wanted rows.")
        .def(
            "choose",
            [](Decoder &self, uintptr_t tokens, uintptr_t positions, uintptr_t slots, uintptr_t tables, uintptr_t starts, uintptr_t wanted, int64_t rows, int64_t sequences,
               int64_t table_stride, int64_t num_wanted, uintptr_t sampling, uintptr_t chosen) {
                self.choose(step_of(tokens, positions, slots, tables, starts, wanted, rows, sequences, table_stride, num_wanted), pointer<const Sampling>(sampling),
                            pointer<int64_t>(chosen));
            },
            nb::call_guard<nb::gil_scoped_release>(), "The next token [wanted] int64 of each wanted row; sampling: records of sampler.h, or 0 for the most likely tokens.");
    m.def("uniform", &uniform, nb::arg("seed"), nb::arg("position"), "A number in [0, 1) that is a function of both.");
    m.def(
        "draw",
        [](uintptr_t logits, int64_t vocabulary, double temperature, int64_t top_k, double top_p, double min_p, uint64_t seed, int64_t position) {
            std::vector<Candidate> room;
            return draw(pointer<const float>(logits), vocabulary, {temperature, top_k, top_p, min_p, seed, position}, room);
        },
        nb::arg("logits"), nb::arg("vocabulary"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("seed"), nb::arg("position"));
}
