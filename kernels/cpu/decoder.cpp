// One step of a decoder (decoder.h): what Context offers, called in order, with activations that stay in memory from step to step.
#include "qforge/decoder.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "qforge/half.h"

namespace qforge {
namespace {

int64_t columns(const Product &product) {
    int64_t sum = 0;
    for (const Part &part : product) sum += part.weight.columns;
    return sum;
}

// The weight of a product that is nothing but one, for linear(); else null
const Weight *plain(const Product &p) { return p.size() == 1 && !p[0].gather && !p[0].elsewhere && p[0].arithmetic == Arithmetic::FP32 ? &p[0].weight : nullptr; }

// Of a row: those of rounded activations, which bring the next keys and values
int64_t multiplications(const Product &product) {
    int64_t sum = 0;
    for (const Part &part : product) {
        const bool rounded = part.arithmetic == Arithmetic::INT8 || part.weight.activations == Activations::INT8 || part.weight.activations == Activations::INT16;
        if (!part.elsewhere && rounded) sum += part.weight.columns * part.weight.inputs();
    }
    return sum;
}

float value_at(Format format, const void *values, int64_t index) {
    if (format == Format::F32) return static_cast<const float *>(values)[index];
    const uint16_t bits = static_cast<const uint16_t *>(values)[index];
    if (format == Format::F16) return half_to_float(bits);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
}

// put(input, value) for all inputs of a weight's column, dequantized
template <typename Put>
void each_value(const Weight &w, int64_t column, const Put &put) {
    const int64_t tile = column / kTile, lane = column % kTile;
    const uint8_t *chunk = chunks_of(w, tile);
    const bool wide = w.format == Format::INT8, integers = wide || w.format == Format::INT4;
    for (int64_t b = 0, i = 0; b < w.blocks; ++b) {
        const int64_t at = (tile * w.blocks + b) * kTile + lane;
        const float scale = integers ? scale_at(w, at) : 1.0f;
        const int zero = integers ? w.zeros[at] : 0;
        for (const int64_t end = i + w.block_k; i < end; i += 8, chunk += chunk_bytes(w.format))
            for (int j = 0; j < 8; ++j) {
                if (!integers) {
                    put(i + j, value_at(w.format, chunk, j * kTile + lane));
                    continue;
                }
                const int code = wide ? chunk[j / 4 * 64 + lane * 4 + j % 4] : chunk[lane * 4 + j % 4] >> (j / 4 * 4) & 15;
                put(i + j, static_cast<float>(code - zero) * scale);
            }
    }
}

// Sequences [first, end) of a step, as a step of their own
struct Share {
    std::vector<int32_t> query_starts;
    std::vector<int64_t> wanted;
    Step step;
    int64_t first_wanted;  // of the whole step's

    Share(const Step &s, int64_t first, int64_t end) {
        const int32_t row = s.query_starts[first], row_end = s.query_starts[end];
        for (int64_t i = first; i <= end; ++i) query_starts.push_back(s.query_starts[i] - row);
        const int64_t *from = std::lower_bound(s.wanted, s.wanted + s.num_wanted, row), *upto = std::lower_bound(from, s.wanted + s.num_wanted, row_end);
        for (const int64_t *w = from; w != upto; ++w) wanted.push_back(*w - row);
        first_wanted = from - s.wanted;
        step = {s.tokens + row, s.positions + row, s.slots + row, s.block_tables + first * s.table_stride, query_starts.data(), wanted.data(), row_end - row, end - first, s.table_stride, upto - from};
    }
    Share(const Share &) = delete;
};

}  // namespace

struct Decoder::Alone {
    Context context;
    Decoder decoder;
    explicit Alone(const Decoder &of) : context(1, of.context_.isa()), decoder(context, of.shape_, of.embedding_, of.norm_, of.layers_, of.head_, of.far_ns_) {}
};

Decoder::~Decoder() = default;

template <typename F>
void Decoder::each_alone(int64_t count, const F &run) {
    std::vector<std::exception_ptr> failed(static_cast<size_t>(count));  // by want of memory
    context_.tasks(count, [&](int64_t i, int thread) {
        try {
            run(i, alone_[static_cast<size_t>(thread)]->decoder);
        } catch (...) {
            failed[static_cast<size_t>(i)] = std::current_exception();
        }
    });
    for (const std::exception_ptr &f : failed)
        if (f) std::rethrow_exception(f);
}

Decoder::Decoder(Context &context, const DecoderShape &shape, const Embedding &embedding, const float *norm, std::vector<Layer> layers, Product head, double far_ns)
    : context_(context), shape_(shape), embedding_(embedding), norm_(norm), layers_(std::move(layers)), head_(std::move(head)), far_ns_(far_ns) {
    candidates_.resize(static_cast<size_t>(context.threads()));
    bool all_here = context.threads() > 1;
    const auto look = [&](const Product &product) {
        for (const Part &part : product) all_here = all_here && !part.elsewhere;
    };
    for (const Layer &layer : layers_) layer.each_product(look);
    look(head_);
    if (all_here)
        for (int t = 0; t < context.threads(); ++t) alone_.push_back(std::make_unique<Alone>(*this));
}

void Decoder::set_ropes(std::vector<RopeTables> ropes) {
    ropes_ = std::move(ropes);
    for (const auto &a : alone_) a->decoder.set_ropes(ropes_);
}

void Decoder::reserve(int64_t rows) {
    if (rows <= reserved_) return;
    int64_t wide = 0, narrow = shape_.width, gathered = 0;
    bool experts = false;
    const auto measure = [&](const Product &product) {
        for (const Part &part : product)
            if (part.gather) gathered = std::max(gathered, part.weight.inputs());
    };
    for (const Layer &layer : layers_) {
        layer.each_product(measure);
        wide = std::max({wide, columns(layer.qkv), columns(layer.router)});
        narrow = std::max(narrow, layer.heads * layer.cache.head_dim);
        for (const Mlp &mlp : layer.mlps) wide = std::max(wide, columns(mlp.gate_up)), narrow = std::max(narrow, columns(mlp.gate_up) / 2);
        experts = experts || !layer.router.empty();
    }
    measure(head_);
    for (Scratch *room : {&x_, &next_, &branch_}) *room = take_floats(rows * shape_.width);
    if (experts) {
        sent_ = take_floats(rows * shape_.width);
        answers_ = take_floats(rows * shape_.width * shape_.active_experts);
        routes_.reserve(rows, shape_.active_experts);
    }
    wide_ = take_floats(rows * wide);
    narrow_ = take_floats(rows * narrow);
    gathered_ = take_floats(rows * std::max<int64_t>(gathered, 1));
    reserved_ = rows;
}

void Decoder::embed(const int64_t *tokens, int64_t rows) {
    const Embedding &e = embedding_;
    context_.rows(rows, 1 + 4096 / shape_.width, [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; ++r) {
            float *x = x_.get() + r * shape_.width;
            if (e.table) {
                for (int64_t i = 0; i < shape_.width; ++i) x[i] = value_at(e.format, e.table, tokens[r] * shape_.width + i) * e.scale;
                continue;
            }
            each_value(e.tiles, tokens[r], [&](int64_t i, float value) {
                const int64_t input = e.gather ? e.gather[i] : i;
                if (input < shape_.width) x[input] = value * e.scale;
            });
        }
    });
}

void Decoder::product(const Product &product, const float *x, int64_t rows, float *y, const Context::Rows &before) {
    if (rows == 0) return;
    const int64_t y_stride = columns(product);
    const Context::Rows nothing;
    const Part &first = product.front();
    const bool with_first = !first.gather && !first.elsewhere;  // whether the first part has its rows computed
    if (before && !with_first) context_.rows(rows, worth_handing_over(first.inputs), before);
    for (const Part &part : product) {
        const float *from = x;
        const Context::Rows &missing = &part == &first && with_first ? before : nothing;
        if (part.gather) {
            const int64_t inputs = part.weight.inputs();
            from = gathered_.get();
            context_.rows(rows, worth_handing_over(inputs), [&](int64_t row, int64_t end) {
                for (int64_t r = row; r < end; ++r)
                    for (int64_t i = 0; i < inputs; ++i) gathered_[r * inputs + i] = part.gather[i] < part.inputs ? x[r * part.inputs + part.gather[i]] : 0.0f;
            });
        }
        if (part.elsewhere)
            part.elsewhere(reinterpret_cast<uintptr_t>(from), rows, reinterpret_cast<uintptr_t>(y), y_stride);
        else if (part.arithmetic == Arithmetic::INT8)
            context_.linear_int8(part.weight, from, rows, part.weight.inputs(), part.static_scale, y, y_stride, missing);
        else
            context_.linear(part.weight, from, rows, part.weight.inputs(), y, y_stride, missing);
        y += part.weight.columns;
    }
}

// y = down(activation(gate) * up) of x, which `before`, if any, computes
void Decoder::mlp(const Mlp &mlp, const float *x, int64_t rows, float *y, const Context::Rows &before) {
    const Weight *gate_up = plain(mlp.gate_up), *down = plain(mlp.down);
    if (gate_up && down && context_.gates(*gate_up, *down, rows)) return context_.linear_gated(*gate_up, *down, x, rows, gate_up->inputs(), y, down->columns, shape_.activation, before);
    product(mlp.gate_up, x, rows, wide_.get(), before);
    product(mlp.down, narrow_.get(), rows, y, context_.rows_of(GateRows{wide_.get(), narrow_.get(), columns(mlp.gate_up) / 2, shape_.activation}));
}

// branch = the weighted sum of what each row's experts make of it, in the order of experts, so that a row's bits do not depend on the others. Where there are experts enough, each
// is computed by one thread, which waits for nobody until all are.
void Decoder::mixture(const Layer &layer, int64_t rows, const Context::Rows &before) {
    constexpr size_t kEnough = 4;  // for a thread
    const int64_t width = shape_.width, experts = columns(layer.router), active = shape_.active_experts;
    product(layer.router, next_.get(), rows, wide_.get(), before);
    context_.rows(rows, worth_handing_over(experts * active), [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; ++r) routes_.route(wide_.get() + r * experts, r, experts, active, shape_.normalized_experts);
    });
    routes_.sort(rows, experts, active);
    const auto &groups = routes_.groups();
    if (!alone_.empty() && groups.size() >= kEnough * alone_.size())
        each_alone(static_cast<int64_t>(groups.size()), [&](int64_t i, Decoder &by) { ask(layer, groups[static_cast<size_t>(i)], by); });
    else
        for (const Routes::Group &group : groups) ask(layer, group, *this);
    context_.rows(rows, worth_handing_over(width * active), [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; ++r) {
            float *sum = branch_.get() + r * width;
            std::fill(sum, sum + width, 0.0f);
            for (const Routes::Share *s = routes_.shares_of(r, active), *last = s + active; s != last; ++s) {
                const float *answer = answers_.get() + s->place * width;
                for (int64_t i = 0; i < width; ++i) sum[i] += s->weight * answer[i];
            }
        }
    });
}

// What an expert makes of its rows, with another decoder's threads and memory
void Decoder::ask(const Layer &layer, const Routes::Group &group, Decoder &by) {
    const int64_t width = shape_.width, count = group.end - group.first;
    by.reserve(count);
    const auto take = [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; ++i) std::copy_n(next_.get() + routes_.row_at(group.first + i) * width, width, by.sent_.get() + i * width);
    };
    by.mlp(layer.mlps[static_cast<size_t>(group.expert)], by.sent_.get(), count, answers_.get() + group.first * width, take);
}

Attention Decoder::attention_of(const Layer &layer, const Step &step) const {
    const RopeTables &rope = ropes_[static_cast<size_t>(layer.rope)];
    return {layer.cache, wide_.get(), narrow_.get(), layer.heads, layer.window, layer.scale, layer.q_norm, layer.k_norm, shape_.norm_eps,
            rope.cosines, rope.sines, step.positions, step.slots, step.block_tables, step.table_stride, layer.whole_norms};
}

// Only the wanted rows of what goes on: after the last layer's attention nobody looks at the others any more.
int64_t Decoder::keep(const Step &step, int64_t attended) {
    for (int64_t i = 0; i < step.num_wanted; ++i) {
        const int64_t from = step.wanted[i];
        if (from == i) continue;
        std::memmove(x_.get() + i * shape_.width, x_.get() + from * shape_.width, static_cast<size_t>(shape_.width) * sizeof(float));
        std::memmove(narrow_.get() + i * attended, narrow_.get() + from * attended, static_cast<size_t>(attended) * sizeof(float));
    }
    return step.num_wanted;
}

// What attention will read while the products before it are computed, for more rows than make these wait for their weights
void Decoder::bring(const Layer &layer, const Layer &next, const Step &step) {
    if (step.rows <= kFewRows) return;
    int64_t products = 0;
    for (const Product *p : {&layer.output, &layer.mlps[0].gate_up, &layer.mlps[0].down, &next.qkv}) products += step.rows * multiplications(*p);  // of experts, the first computes no more
    if (products) context_.bring(attention_of(next, step), step.query_starts, step.sequences, products);
}

// Where cores have no cache in common, what each computes of every row travels to the other between any two products, which takes longer than reading all weights once for each core
// (SmolLM2 on two chiplets of a Zen 4: 8 sequences 6.15 -> 5.27 ms a step, steps of 16 to 32 1.84 -> 1.53 s of a load; on one chiplet 4.4 -> 4.8 ms and 1.43 -> 1.47 s). So where an exchange
// takes long right now (a host moves its guests' cores), each thread computes sequences of its own from the embedding to the logits. Nobody can help a thread then whose core another process
// has, too: after a step in which one took much longer than another, the next ones are computed together, where who has time takes tasks.
bool Decoder::apart(const Step &step, float *logits) {
    constexpr int64_t kMostOfSequence = 16;  // a token and guesses, no prompt
    constexpr int kTogether = 16;            // steps
    constexpr double kUneven = 1.5;
    if (exchange_ <= far_ns_ || !rows_for_all(step)) return false;
    if (together_ > 0 && far_ns_ >= 0) return --together_, false;
    const auto count = static_cast<int64_t>(alone_.size());
    for (int64_t s = 0; s < step.sequences; ++s)
        if (step.query_starts[s + 1] - step.query_starts[s] > kMostOfSequence) return false;
    std::vector<int64_t> cuts{0};  // of sequences: each thread has the rows that bring all to its share
    for (int64_t t = 1; t <= count; ++t) {
        int64_t s = cuts.back();
        while (s < step.sequences && step.query_starts[s + 1] * count <= step.rows * t) ++s;
        cuts.push_back(s);
        if ((step.query_starts[s] - step.query_starts[cuts[cuts.size() - 2]]) * count * 8 > step.rows * 9) return false;
    }
    std::vector<double> seconds(static_cast<size_t>(count));
    each_alone(count, [&](int64_t task, Decoder &by) {
        const auto t = static_cast<size_t>(task);
        const auto start = std::chrono::steady_clock::now();
        const Share share(step, cuts[t], cuts[t + 1]);
        if (share.step.rows) by.together(share.step, logits + share.first_wanted * shape_.vocabulary);
        seconds[t] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
    const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
    if (*most > kUneven * *least) together_ = kTogether;
    ++steps_apart_;
    return true;
}

// Whether each thread may have rows enough for weights that all of them read: the more threads, the more rows
bool Decoder::rows_for_all(const Step &step) const {
    const auto count = static_cast<int64_t>(alone_.size());
    return count && step.rows >= count * std::max<int64_t>(kFewRows, 2 * count);
}

void Decoder::logits(const Step &step, float *logits) {
    constexpr int kMisses = 8;  // a thread that was done long before the others sleeps; one that never comes has no core, and whoever has one should take all its work
    const auto turn = context_.turn();
    if (!apart(step, logits)) together(step, logits);
    if (step.sequences == 1 || !rows_for_all(step)) return;
    const double now = context_.exchange();  // here all are awake, as they are not when a step begins
    missed_ = now > 0 ? 0 : missed_ + 1;
    if (now > 0 || missed_ >= kMisses) exchange_ = now;
}

void Decoder::together(const Step &step, float *logits) {
    struct Turn {
        Context &context;
        std::unique_lock<std::recursive_mutex> held = context.turn();
        ~Turn() { context.bring_nothing(); }  // where a product that runs elsewhere has thrown, there was no attention that ended it
    } turn{context_};
    reserve(step.rows);
    int64_t rows = step.rows;
    embed(step.tokens, rows);
    const auto norm = [&](const float *weight) { return context_.rows_of(NormRows{x_.get(), weight, next_.get(), shape_.width, shape_.norm_eps}); };
    const auto residual = [&](const float *branch, const float *weight) { return context_.rows_of(ResidualRows{x_.get(), branch_.get(), branch, weight, next_.get(), shape_.width, shape_.norm_eps}); };
    auto before = norm(layers_[0].input_norm);
    for (size_t i = 0; i < layers_.size(); ++i) {
        const Layer &layer = layers_[i];
        const Layer *next = i + 1 < layers_.size() ? &layers_[i + 1] : nullptr;
        product(layer.qkv, next_.get(), rows, wide_.get(), before);
        const Attention attention = attention_of(layer, step);
        const Weight *output = plain(layer.output), *rounded = next && output && context_.rounds(attention, *output) ? output : nullptr;
        context_.attention(attention, step.query_starts, step.sequences, rounded, next ? nullptr : step.wanted, step.num_wanted);
        if (next) bring(layer, *next, step);
        else rows = keep(step, layer.heads * layer.cache.head_dim);
        if (rounded) context_.linear_rounded(*rounded, rows, branch_.get(), rounded->columns);
        else product(layer.output, narrow_.get(), rows, branch_.get());
        const auto mlp_input = residual(layer.post_attention_norm, layer.mlp_norm);
        if (layer.router.empty()) mlp(layer.mlps[0], next_.get(), rows, branch_.get(), mlp_input);
        else mixture(layer, rows, mlp_input);
        before = residual(layer.post_mlp_norm, next ? next->input_norm : norm_);
    }
    product(head_, next_.get(), rows, logits, before);
}

void Decoder::choose(const Step &step, const Sampling *sampling, int64_t *chosen) {
    const auto turn = context_.turn();
    if (step.num_wanted > logit_rows_) {
        logits_ = take_floats(step.num_wanted * shape_.vocabulary);
        logit_rows_ = step.num_wanted;
    }
    logits(step, logits_.get());
    context_.tasks(step.num_wanted, [&](int64_t row, int thread) {
        const float *row_logits = logits_.get() + row * shape_.vocabulary;
        chosen[row] = sampling ? draw(row_logits, shape_.vocabulary, sampling[row], candidates_[static_cast<size_t>(thread)], context_.weight_sum()) : most_likely(row_logits, shape_.vocabulary);
    });
}

}  // namespace qforge
