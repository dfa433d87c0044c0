// A decoder as data, and one step of it in one call: embedding, layers over a paged cache, norm, output head on the wanted rows, sampling. Families differ in data alone.
//
// Rows: T tokens of the step, of which L have their logits wanted. All activations are fp32, one row after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "qforge/context.h"
#include "qforge/sampler.h"

namespace qforge {

// A product that no kernel of this module runs: x [rows][inputs] -> y [rows][columns], y_stride floats from row to row
using Elsewhere = std::function<void(uintptr_t x, int64_t rows, uintptr_t y, int64_t y_stride)>;

enum class Arithmetic : int { FP32 = 0, INT8 = 1 };  // what activations are when they meet the weights: as they are, or rounded to int8 (Context::linear, linear_int8)

struct Part {
    Weight weight;
    Arithmetic arithmetic;
    float static_scale;     // INT8: 0, or the scale of all rows
    int64_t inputs;         // of x; weight.inputs() counts padding too
    const int64_t *gather;  // [weight.inputs()], the input at each place, `inputs` for zero; null where x is taken as it is
    Elsewhere elsewhere;    // empty, or runs instead of `weight`, of which only `columns` counts
};

using Product = std::vector<Part>;  // weights that share their input; outputs stand side by side

struct Mlp {
    Product gate_up, down;
};

struct Layer {
    const float *input_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;  // null where the family has none
    const float *q_norm, *k_norm;                                              // null where the family has none
    Product qkv, output, router;
    std::vector<Mlp> mlps;  // one and no router, or experts (at least one)
    Cache cache;
    int64_t heads, window, rope;  // rope: number of its table
    float scale;
    bool whole_norms;  // see Attention

    // Calls use(product) for each of them
    template <typename F>
    void each_product(const F &use) const {
        for (const Product *p : {&qkv, &output, &router}) use(*p);
        for (const Mlp &mlp : mlps) use(mlp.gate_up), use(mlp.down);
    }
};

// Token embeddings: [vocabulary][width], or the tiles of a weight that is the output head too
struct Embedding {
    Format format;  // of the table: F32, F16 or BF16
    const void *table;  // null: the tiles
    Weight tiles;       // F32, F16, BF16, INT8 or INT4
    const int64_t *gather;  // as Part has it
    float scale;
};

struct DecoderShape {
    int64_t width, vocabulary;
    float norm_eps;
    Activation activation;
    int64_t active_experts;   // of each token, in layers that have a router
    bool normalized_experts;  // whether their weights sum to 1, or are shares of all experts' sum
};

// Which experts of a layer compute which rows of a step, and by what each result counts
class Routes {
  public:
    void reserve(int64_t rows, int64_t active);
    void route(const float *logits, int64_t row, int64_t experts, int64_t active, bool normalized);  // of one row [experts]: the largest, of equal ones the first
    void sort(int64_t rows, int64_t experts, int64_t active);                                         // once all rows are routed

    struct Group {  // rows that an expert computes, places [first, end) of all that are sent
        int64_t expert, first, end;
    };
    struct Share {  // what counts for a row
        int64_t place;
        float weight;
    };
    const std::vector<Group> &groups() const { return groups_; }                      // by expert; those without rows have none
    int64_t row_at(int64_t place) const { return rows_[static_cast<size_t>(place)]; }  // rising within a group
    const Share *shares_of(int64_t row, int64_t active) const { return shares_.data() + row * active; }  // [active], by expert

  private:
    struct Choice {
        int64_t expert;
        float weight;
    };
    std::vector<Choice> chosen_;  // [rows][active]
    std::vector<Group> groups_;
    std::vector<int64_t> rows_;   // by place
    std::vector<Share> shares_;   // [rows][active]
};

struct RopeTables {
    const float *cosines, *sines;  // [positions][head_dim / 2]
};

struct Step {
    const int64_t *tokens, *positions, *slots;  // [T]
    const int32_t *block_tables;                // [sequences][table_stride]
    const int32_t *query_starts;                // [sequences + 1]
    const int64_t *wanted;                      // [L], rising
    int64_t rows, sequences, table_stride, num_wanted;
};

class Decoder {
  public:
    Decoder(Context &context, const DecoderShape &shape, const Embedding &embedding, const float *norm, std::vector<Layer> layers, Product head, double far_ns);  // far_ns: an exchange that takes longer has threads compute apart, less than 0 always
    ~Decoder();

    void set_ropes(std::vector<RopeTables> ropes);
    void logits(const Step &step, float *logits);                               // [L][vocabulary]
    void choose(const Step &step, const Sampling *sampling, int64_t *chosen);  // [L]; sampling null: greedy

    int64_t steps_apart() const { return steps_apart_; }  // in which each thread computed sequences of its own

  private:
    bool apart(const Step &step, float *logits);  // whether each thread has computed sequences of its own
    bool rows_for_all(const Step &step) const;
    void together(const Step &step, float *logits);
    void embed(const int64_t *tokens, int64_t rows);
    void product(const Product &product, const float *x, int64_t rows, float *y, const Context::Rows &before = {});
    void mlp(const Mlp &mlp, const float *x, int64_t rows, float *y, const Context::Rows &before);
    void mixture(const Layer &layer, int64_t rows, const Context::Rows &before);
    void ask(const Layer &layer, const Routes::Group &group, Decoder &by);
    template <typename F>
    void each_alone(int64_t count, const F &run);  // run(i, decoder) for each i in [0, count), each by a thread alone
    Attention attention_of(const Layer &layer, const Step &step) const;
    int64_t keep(const Step &step, int64_t attended);  // how many rows that are
    void bring(const Layer &layer, const Layer &next, const Step &step);
    void reserve(int64_t rows);

    Context &context_;
    DecoderShape shape_;
    Embedding embedding_;
    const float *norm_;
    std::vector<Layer> layers_;
    Product head_;
    std::vector<RopeTables> ropes_;
    int64_t reserved_ = 0;
    Scratch x_, next_, branch_, wide_, narrow_, gathered_, sent_, answers_, logits_;  // sent_: rows of one expert; answers_: those of all, by place
    Routes routes_;
    int64_t logit_rows_ = 0;
    std::vector<std::vector<Candidate>> candidates_;
    struct Alone;  // a decoder of the same layers that has one thread
    std::vector<std::unique_ptr<Alone>> alone_;  // for each thread, or none
    double far_ns_, exchange_ = 0;               // exchange_: nanoseconds that one took after the last step
    int missed_ = 0, together_ = 0;              // steps after which a thread did not come to it; steps to come that are not apart
    int64_t steps_apart_ = 0;
};

}  // namespace qforge
