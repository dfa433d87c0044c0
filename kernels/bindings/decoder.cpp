// Python's view of the decoder. Weights come as addresses: qforge/runtime/native_decoder.py keeps what they point to, and checks dtypes and shapes. A step comes as arrays.
#include "decoder.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "qforge/decoder.h"

namespace nb = nanobind;
using namespace qforge;

namespace {

template <typename T>
T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// What an array has in memory, as long as this lives; asked for as a buffer, since numpy's `ctypes.data` takes 5 us after a step that has used up the caches
template <typename T>
class Numbers {
  public:
    explicit Numbers(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT)) throw nb::python_error();
        if (view_.itemsize == sizeof(T) && view_.ndim == 1 && std::strchr("ilq", *view_.format)) return;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("an array of a step has other numbers, or dimensions");
    }
    ~Numbers() { PyBuffer_Release(&view_); }
    Numbers(const Numbers &) = delete;

    const T *data() const { return static_cast<const T *>(view_.buf); }
    int64_t size() const { return view_.shape[0]; }

  private:
    Py_buffer view_;
};

struct Arrays {
    Numbers<int64_t> tokens, positions, slots;
    Numbers<int32_t> tables, starts;
    Numbers<int64_t> wanted;

    Arrays(nb::handle of_tokens, nb::handle of_positions, nb::handle of_slots, nb::handle of_tables, nb::handle of_starts, nb::handle of_wanted)
        : tokens(of_tokens), positions(of_positions), slots(of_slots), tables(of_tables), starts(of_starts), wanted(of_wanted) {
        if (positions.size() != tokens.size() || slots.size() != tokens.size() || sequences() < 1 || tables.size() % sequences()) throw std::invalid_argument("arrays of a step do not fit each other");
    }
    Step step() const { return {tokens.data(), positions.data(), slots.data(), tables.data(), starts.data(), wanted.data(), tokens.size(), sequences(), tables.size() / sequences(), wanted.size()}; }
    int64_t sequences() const { return starts.size() - 1; }
};

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
            [](Decoder &self, nb::handle tokens, nb::handle positions, nb::handle slots, nb::handle tables, nb::handle starts, nb::handle wanted, uintptr_t logits) {
                const Arrays arrays(tokens, positions, slots, tables, starts, wanted);
                const nb::gil_scoped_release released;
                self.logits(arrays.step(), pointer<float>(logits));
            },
            "Logits [wanted, vocabulary] fp32 of a step's wanted rows.")
        .def(
            "choose",
            [](Decoder &self, nb::handle tokens, nb::handle positions, nb::handle slots, nb::handle tables, nb::handle starts, nb::handle wanted, uintptr_t sampling) {
                const Arrays arrays(tokens, positions, slots, tables, starts, wanted);
                std::vector<int64_t> chosen(static_cast<size_t>(arrays.wanted.size()));
                {
                    const nb::gil_scoped_release released;
                    self.choose(arrays.step(), pointer<const Sampling>(sampling), chosen.data());
                }
                return chosen;
            },
            "The next token of each wanted row; sampling: records of sampler.h, or 0 for the most likely tokens.");
    m.def("uniform", &uniform, nb::arg("seed"), nb::arg("position"), "A number in [0, 1) that is a function of both.");
    m.def(
        "draw",
        [](uintptr_t logits, int64_t vocabulary, double temperature, int64_t top_k, double top_p, double min_p, uint64_t seed, int64_t position) {
            std::vector<Candidate> room;
            return draw(pointer<const float>(logits), vocabulary, {temperature, top_k, top_p, min_p, seed, position}, room);
        },
        nb::arg("logits"), nb::arg("vocabulary"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("seed"), nb::arg("position"));
}
